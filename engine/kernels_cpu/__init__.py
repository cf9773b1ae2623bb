"""Kernels in C for CPUs, compiled at first use where the machine has a C compiler.

PyTorch's operators serve every machine, and are what these are tested against. Where a few small operators follow each
other in memory that a core could have kept at hand (attention of one query, norms, the optimizer's step), a loop of our
own is several times as fast, and a file of it compiles in under a second. Where it can't be compiled, the operators
serve.
"""
