"""Loss functions on tensors, independent of tasks and engines.

May import config, distributed and the packages below them.
"""
