"""Files on disk and in object stores: atomic writes, JSON lines, caches, locks, fault injection.

Imports only samecurve.errors.
"""
