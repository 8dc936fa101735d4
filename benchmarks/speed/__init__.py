"""Speed on a CPU: scripts/bench_speed.py. The recipes, a loop for each contestant, rows.py for all, and the page."""
