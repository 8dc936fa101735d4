"""Speed on GPUs: scripts/bench_gpu.sh.

cases.py: what is measured; material.py, runs.py: how; results.py: what is kept; page.py: the page.
"""
