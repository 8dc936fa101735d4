"""Every recipe under every strategy against one process: scripts/compare_recipes.py, results in curves.json."""
