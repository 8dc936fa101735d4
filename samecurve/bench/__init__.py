"""Benchmarks of `python -m samecurve bench`, and evaluation of trained models. May import everything but cli."""
