"""What became of runs that something happened to: scripts/reliability.py."""
