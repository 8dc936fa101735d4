"""Facts that need no torch: tasks, optimizers, model families, dtypes, devices. Imports nothing but errors."""
