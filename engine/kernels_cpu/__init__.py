"""Kernels in C for CPUs, compiled at first use if the machine has a C compiler.

Several small operators of PyTorch in a row read and write memory that one loop keeps in a core's caches. A kernel in C
is then several times as fast, and its file compiles in about a second. Without a C compiler PyTorch's operators run,
which are also the references of the tests.
"""
