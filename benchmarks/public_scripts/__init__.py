"""Runs `prove` on scripts that others published; benchmarks/public_scripts.md has what it says of them."""
