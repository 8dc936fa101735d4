"""Engines: one optimizer step under each strategy. The training loop and the tasks do not depend on the strategy.

May import interfaces and the packages below it, never tasks.
"""
