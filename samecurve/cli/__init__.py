"""`python -m samecurve COMMAND`: one module per command. May import everything."""
