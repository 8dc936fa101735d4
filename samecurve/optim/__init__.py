"""Optimizers (with update rules that torch.optim lacks), parameter groups and the learning rate schedule.

May import losses, config, distributed and the packages below them.
"""
