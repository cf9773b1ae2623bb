"""Predict the memory and the time of a stage before it starts, and choose the fastest setting that fits."""
