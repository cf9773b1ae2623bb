"""Offload tiers: equal curves, bytes held, the host's and the disk's speed, large models on a small machine."""
