"""What options of a step cost and save: scripts/bench_options.py. tables.py: what is measured; page.py: the page."""
