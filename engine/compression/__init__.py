"""Numbers in fewer bits for the wire: blockwise int8, and 1-bit Adam's signs."""
