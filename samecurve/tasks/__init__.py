"""Training tasks: rows, loss and metrics. Each task is the module that the recipe's `task` names.

May import interfaces and lower packages, never engines.
"""
