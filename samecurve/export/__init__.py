"""Hugging Face folders and model cards of trained models. May import reports and lower packages, not engines."""
