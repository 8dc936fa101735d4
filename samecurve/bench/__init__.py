"""What the commands of `python -m samecurve bench` measure and print. May import everything but cli."""
