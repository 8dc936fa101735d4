"""One run: its directory, its lifecycle, and the threads that supervise it.

Imports: checkpoint, interfaces and the layers below them; never tasks or engines.
"""
