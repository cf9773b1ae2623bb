"""The terminal chat: model folders, conversations that fit the context, and the terminal session."""
