"""Rows of one length, readable by any index, for each kind of task, and their mixtures."""
