"""`zerochat doctor`: one screen with the data, batches and steps of a command line, before any work."""
