"""Processes of one run: the control group beside the training group, CPU workers, cores, random state.

May import config and what is below it.
"""
