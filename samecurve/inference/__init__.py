"""A trained model without its strategy: find, load, generate, predict, merge. May import export and what is below."""
