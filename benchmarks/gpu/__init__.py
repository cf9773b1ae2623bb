"""All measurements of a GPU, in one run: `python -m benchmarks.gpu`."""
