"""Commands of `python -m samecurve`: one module per command, which checks arguments without torch. May import all."""
