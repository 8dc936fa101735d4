"""From files to batches: sources, formats, tokenizers, the token store, the sample order, batches of micro-batches.

May import losses, config, distributed and what is below them.
"""
