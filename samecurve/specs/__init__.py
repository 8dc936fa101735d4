"""Facts about tasks, optimizers, model families, dtypes and devices. Needs no torch; imports only errors."""
