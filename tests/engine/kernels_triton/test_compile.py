"""Every Triton kernel compiles to machine code ahead of time and fits the shared memory of the GPUs that run it."""

import sys

from tests.ranks import Worker


def compile_all() -> None:
    from tests.engine.kernels_triton import variants

    sys.exit(variants.main())


def test_kernels_compile_and_fit() -> None:
    """Compile in another process, because this process declares the kernels for Triton's interpreter."""
    worker = Worker(compile_all, environment={})
    output, _ = worker.communicate()
    assert worker.returncode == 0, output
