"""Commands of `python -m samecurve bench`: one module per command. The benchmarks are in samecurve/bench."""
