"""What all tests found, a part of them at a time: scripts/full_run.py, whose results are in full_run.json."""
