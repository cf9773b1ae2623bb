"""The peers' side: each module runs in the peer's own environment and imports nothing of ours but the bench's frame."""
