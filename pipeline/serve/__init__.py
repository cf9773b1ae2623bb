"""An OpenAI-compatible HTTP server for the models of a run: requests, one decoding thread, answers."""
