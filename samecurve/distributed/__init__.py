"""Processes of one run: the control group for messages outside training, CPU workers, CPU binding, random state.

Imports: config and the layers below it.
"""
