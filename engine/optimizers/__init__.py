"""Optimizers that torch.optim does not have, and the moving average of the weights."""
