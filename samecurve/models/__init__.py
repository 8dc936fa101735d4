"""Models: configuration, weights, adapters, and techniques that make layers cheaper or faster.

May import losses, config, distributed and the packages below them.
"""
