"""Trained models without their strategy: find, load, generate, predict, merge. May import export and lower packages."""
