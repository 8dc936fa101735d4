"""Loss functions on tensors. They know no task and no engine.

May import config, distributed and what is below them.
"""
