"""The recipe: its schema, the YAML documents with their line numbers, the rules across keys. Loads no torch.

May import specs and storage.
"""
