"""What runs on GPUs only, on a pretended one (tests/pretended_gpu), which says what a GPU would not forgive."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended_gpu import building

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = building.lacking()
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=str(WITHOUT))
ON_GPU = (
    "tests/engine/generation/test_cuda_graph.py::test_graphs_equal_the_steps_called[llama]",
    "tests/engine/generation/test_cuda_graph.py::test_samples_read_their_prompt_once",
    "tests/engine/generation/test_cuda_graph.py::test_a_model_that_asks_the_device_is_called_and_says_so",
    "tests/engine/generation/test_cuda_graph.py::test_without_a_compiler_it_draws_the_same_and_says_so",
    "tests/engine/test_on_gpu.py::test_updates_are_those_of_plain_pytorch",
    "tests/pipeline/models/test_on_gpu.py::test_the_kernel_computes_the_same",
    "tests/pipeline/models/test_on_gpu.py::test_documents_are_laid_out_before_compiled_code_sees_them",
    "tests/pretended_gpu/work.py",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    building.library()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


def test_the_gpu_tests_pass_without_a_fault() -> None:
    plugin = ("-m", "pytest", "-p", "tests.pretended_gpu.plugin", "-p", "no:cacheprovider", "-q", "-m", "gpu")
    done = run(*plugin, *ON_GPU)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


FAULTY = """
import os
import threading

os.environ["PRETENDED_GPUS"] = "2"
from tests.pretended_gpu import cuda
import torch
from engine.parallel import collectives

side = torch.cuda.Stream()
x = torch.ones(1000, device="cuda")
with torch.cuda.stream(side):
    y = x * 2  # without waiting for the ones
assert "reads what" in cuda.faults()[0]
x = torch.ones(1000, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    y = x + 1
del x
x = torch.zeros(10, device="cuda")  # the allocator may well give it the same memory
assert "freed while another stream" in cuda.faults()[0]
pinned = torch.zeros(1000, pin_memory=True)
y.copy_(pinned, non_blocking=True)
pinned[0] = 1
assert "was written to while" in cuda.faults()[0]
pinned.copy_(torch.ones(1000, device="cuda"), non_blocking=True)
assert pinned[0] != 1  # not there yet
torch.cuda.synchronize()
assert pinned[0] == 1
for wrong in (lambda: y + torch.ones(1000), lambda: torch._fused_adamw_(
    [y], [y], [y], [y], [], [torch.zeros(())], amsgrad=False, lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1.0,
    maximize=False)):
    try:
        wrong()
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("host and device were mixed")
graph, y = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
with torch.cuda.stream(side):
    side.wait_stream(torch.cuda.default_stream())
    graph.capture_begin()
    z = (y + 1).sum()
    y.zero_()
    graph.capture_end()
assert y.sum() == 4  # what is captured did not run
graph.replay()
assert z == 8 and y.sum() == 0
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(side):
    graph.capture_begin(pool=(0, 7))
    for wrong, says in (
        (z.item, "when stream is capturing"), (graph.capture_end, "previous error during capture"),
        (lambda: graph.capture_begin(pool=(0, 7)), "already recording"),
    ):
        try:
            wrong()
        except RuntimeError as error:
            assert says in str(error)
        else:
            raise AssertionError("a capture that read a number went on")
assert "a capture was given up" in cuda.faults()[-1]
cuda.limit(cuda.allocated() + 1000)
try:
    torch.empty(2000, device="cuda")
except torch.OutOfMemoryError:
    cuda.limit()
torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
x, y = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
work = collectives.all_gather(y, x, async_op=True)
y.sum()
assert any("reads what all_gather wrote" in found for found in cuda.faults())
work.wait()
assert y.sum() == 4 and not cuda.faults()
try:
    y + torch.ones(4, device="cuda:1")
except RuntimeError as error:
    assert "same device" in str(error)
else:
    raise AssertionError("two devices were mixed")
torch.cuda.set_device(1)
thread = threading.Thread(target=lambda: torch.ones(4, device="cuda"))
thread.start()
thread.join()
assert torch.ones(4, device="cuda").device.index == 1
assert cuda.faults() == ["memory of device 0 is taken by a process of device 1"]
print("all of it")
"""


def test_it_notices_what_a_gpu_does_not_forgive() -> None:
    done = run("-c", FAULTY)
    assert done.stdout == "all of it\n", done.stdout + done.stderr
