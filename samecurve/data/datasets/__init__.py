"""Random-access rows of one length for each kind of task, and their mixtures."""
