"""Everything that wants a GPU, in one run: `python -m benchmarks.gpu`."""
