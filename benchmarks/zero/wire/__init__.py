"""Bytes on the wire and loss curves, compressed and not."""
