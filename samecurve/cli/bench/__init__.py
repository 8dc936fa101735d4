"""`python -m samecurve bench COMMAND`: one module per command. What they do is in samecurve/bench."""
