"""Files on disk: atomic writes, JSON lines, caches, locks, fault points. Imports nothing but errors."""
