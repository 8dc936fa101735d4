"""What bf16 training keeps and copies: scripts/bench_bf16.py. counts.py: what is counted; page.py: the page."""
