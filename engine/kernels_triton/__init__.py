"""Kernels in Triton for GPUs, each in a file with the kernel's name.

PyTorch's builds for CUDA bring Triton. The files with kernels import it, so `engine.kernels` imports them with the
first CUDA tensor. If Triton cannot compile (`device.has_triton`), the torch references run instead.
"""
