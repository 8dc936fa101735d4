"""What is trained: which rows, which loss, which metrics. A module's name is the recipe's `task`.

May import interfaces and what is below it, never engines.
"""
