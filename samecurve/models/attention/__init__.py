"""Attention implementations for packed documents, and their selection."""
