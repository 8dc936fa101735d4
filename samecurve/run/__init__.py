"""One run: its directory, its lifecycle, and the processes that watch over it.

May import checkpoint, interfaces and what is below them, not tasks or engines.
"""
