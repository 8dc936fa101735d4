"""A judge of training scripts: the same steps under each strategy, or the place where they part."""
