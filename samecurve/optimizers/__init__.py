"""Update rules that torch.optim does not have."""
