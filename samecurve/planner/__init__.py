"""Predicts memory and step time of a training job without running it. No torch. May import strategy and below.

`Job` says what is to run. `memory.anatomy` gives its bytes, `step_time.breakdown` its seconds. Constants that no data
sheet gives are in profiles.json, per software stack, fitted by scripts/fit_planner.py.
"""
