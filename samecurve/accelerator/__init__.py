"""The Accelerator: Accelerate's class with this project's promises, and what it needs of processes and their shards."""
