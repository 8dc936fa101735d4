"""What `python -m samecurve bench` measures and prints, and how good a model is. May import everything but cli."""
