"""Simulated CUDA devices, which run GPU-only code on any machine.

Use `pytest -p tests.simulated_gpu.plugin -m gpu`, or `run_ranks(function, ranks, device="cuda")` of tests/ranks.py.

Tensors report the device `cuda:0` and hold their numbers in host memory (device.cpp). The simulation follows CUDA's
rules:

- An operator on tensors of the host and of the device raises.
- During a capture, and under torch.cuda.set_sync_debug_mode, an operator for which the host waits raises.
- Captured calls run only when the graph is replayed.
- An asynchronous copy to pinned memory contains garbage until the host has waited for it.
- An allocation above the memory limit raises torch.OutOfMemoryError. During a capture, freed memory counts as taken
  until torch.cuda.empty_cache: PyTorch's allocator holds it for other streams, and cannot return it.

The simulation also tracks the order of the streams. These events are faults and fail the test:

- A stream reads or overwrites memory that another stream wrote, without having waited for that stream.
- Freed memory is used again while another stream still uses it.
- The host writes to pinned memory while a copy still reads it, or frees memory that it has pinned itself.
- A process allocates memory of a device that is not its own.

Triton kernels run in Triton's interpreter. PyTorch's variable-length attention follows its definition (flash.py).
Collectives run on their own streams (nccl.py). SIMULATED_GPUS in the environment is the number of devices.

Not simulated: speed, compiled kernels, NCCL itself, memory that captures share, and the rest of the caching allocator.
"""
