"""Hugging Face folders and model cards of trained models. May import reports and what is below it, not engines."""
