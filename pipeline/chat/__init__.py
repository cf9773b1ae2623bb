"""The terminal chat: where its model is, what of the conversation fits, and the terminal itself."""
