"""Files on disk: atomic writes, JSON lines, caches, locks, fault injection. Imports only samecurve.errors."""
