"""From a recipe to a model: configuration, weights, adapters, and what makes its layers cheaper or faster.

May import losses, config, distributed and what is below them.
"""
