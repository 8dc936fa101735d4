"""What a checkpoint costs: scripts/bench_checkpoint.py. runs.py: what is measured; page.py: the page."""
