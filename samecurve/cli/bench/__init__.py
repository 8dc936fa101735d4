"""`python -m samecurve bench COMMAND`: one module per command. What they measure is in samecurve/bench."""
