"""How one optimizer step runs under each strategy. Strategy words stop here.

May import interfaces and what is below it, never tasks.
"""
