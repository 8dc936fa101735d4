"""Optimizers, their parameter groups and the learning rate schedule; update rules that torch.optim does not have.

May import losses, config, distributed and what is below them.
"""
