"""Engines: one optimizer step under each strategy. No code outside this package depends on the strategy.

May import interfaces and the packages below it, never tasks.
"""
