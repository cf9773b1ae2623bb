"""CUDA devices that are pretended, so that what runs on GPUs only runs on every machine: `pytest -p
tests.pretended_gpu.plugin -m gpu`, or `run_ranks(function, ranks, device="cuda")` of tests/ranks.py.

Tensors say that they are on `cuda:0` and hold real numbers in host memory (device.cpp). It keeps CUDA's rules: tensors
of host and device don't mix; within a capture, and under PyTorch's check for it, what makes the host wait raises;
nothing that is captured runs before it is replayed; a copy to pinned memory arrives when it was waited for, garbage
before; memory is full where a limit says so. And it keeps books of what a GPU does beside the host: a stream that reads
or overwrites what another one wrote without having waited for it, memory that is used again while another stream still
uses it, pinned memory that is written to while it is being read are faults, and fail the test. Kernels in Triton run
through its interpreter, PyTorch's variable-length attention by its definition (flash.py).

PRETENDED_GPUS in the environment says how many there are. A process has one of them, and taking memory of another, as a
thread does that was not told which, is a fault. Collectives run on streams of their own (nccl.py).

What it can't show: speed, what the compiled kernels do, NCCL itself, memory that a graph's capture shares, the caching
allocator.
"""
