"""Data pipeline: sources, formats, tokenizers, the token store, the sample order, micro-batches.

May import losses, config, distributed and lower packages.
"""
