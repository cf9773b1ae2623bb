"""Optimizers that torch.optim does not have. Each is imported when a configuration names it."""

ERRORS = ("worker_error_of_", "server_error_of_")
"""The beginnings of the names of 1-bit Adam's states that belong to a number of ranks, which follows."""
