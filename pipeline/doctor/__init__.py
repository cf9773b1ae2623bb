"""`zerochat doctor`: one screen about what a command line would train on what, before any work."""
