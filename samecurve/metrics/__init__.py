"""Metrics of a training run, and their display. Imports: run and the layers below it; never engines."""
