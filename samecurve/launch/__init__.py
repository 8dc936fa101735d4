"""Starting a run's processes: commands and files for every launcher, ssh to hosts, and ranks without a launcher.

Loads no torch. May import strategy and distributed, and what is below them.
"""
