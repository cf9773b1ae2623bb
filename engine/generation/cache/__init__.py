"""The key-value cache, and what a forward sees of it."""
