"""The cost of everything but the engine, by number of ranks: scripts/bench_scale.py."""
