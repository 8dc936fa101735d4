"""What `python -m samecurve bench` measures. Numbers only: what is printed is in cli/bench."""
