"""One training script, every parallel strategy, the same loss curve. Importing this package does nothing."""

__version__ = "0.1.0"
