"""Optimizers that torch.optim does not have."""
