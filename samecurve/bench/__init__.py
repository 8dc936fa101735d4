"""What `python -m samecurve bench` measures. Numbers only: cli/bench prints them. May import everything but cli."""
