"""Kernels in Triton for GPUs, each in a file with the kernel's name, and what compiles them ahead of time.

The files with kernels import Triton, which PyTorch's builds for CUDA bring along; `engine.kernels` imports them when a
CUDA tensor first comes along, and PyTorch's operators serve where Triton can't compile (compiler.py).
"""
