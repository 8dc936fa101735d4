"""Components of the training loop. May import everything but bench, doctor and cli."""
