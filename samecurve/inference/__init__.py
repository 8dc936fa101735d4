"""A trained model without its strategy: load, generate, predict. May import export and everything below it."""
