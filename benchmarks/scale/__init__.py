"""What runs beside the engine, by number of ranks: scripts/bench_scale.py."""
