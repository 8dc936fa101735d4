"""Values of the recipe's `compile`."""

COMPILED = ("regional", "full")  # `auto` becomes one of the values before a model is built
