"""How fast, against whom, in one run: `python -m benchmarks`."""
