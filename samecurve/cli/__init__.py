"""`python -m samecurve COMMAND`: one module per command, which checks its arguments without torch. May import all."""
