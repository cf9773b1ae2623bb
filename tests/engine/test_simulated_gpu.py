"""Run the GPU tests on a simulated GPU (tests/simulated_gpu), and check that the simulation detects misuse of a GPU."""

import re
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from tests.ranks import Worker
from tests.simulated_gpu import building

REASON = building.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
# On one device, ZeRO 1 does what ZeRO 2 does. Offload and activation checkpointing also run the plain stages 2 and 3.
UPDATES = (
    "opt-{'zero_stage': 0}",
    "opt-{'zero_stage': 2, 'offload_optimizer': 'cpu'}",
    "opt-{'zero_stage': 3, 'offload_optimizer': 'cpu', 'offload_parameters': 'cpu'}",
    "opt-{'zero_stage': 3, 'activation_checkpointing': True}",
    "llama-{'zero_stage': 3, 'offload_optimizer': 'nvme'}",
)
ON_GPU = (
    "tests/engine/generation/test_cuda_graph.py::test_graphs_equal_steps_without_graphs[llama]",
    "tests/engine/generation/test_cuda_graph.py::test_samples_read_their_prompt_once",
    "tests/engine/generation/test_cuda_graph.py::test_a_model_that_cannot_be_captured_warns_and_runs_without_graphs",
    "tests/engine/generation/test_cuda_graph.py::test_without_a_compiler_it_warns_and_samples_the_same",
    *(f"tests/engine/test_on_gpu.py::test_updates_equal_plain_pytorch[{case}]" for case in UPDATES),
    "tests/engine/test_on_gpu.py::test_attention_builds_no_plan_for_each_length",
    "tests/engine/test_on_gpu.py::test_groups_have_the_flight_recorder_that_the_launcher_reads",
    "tests/pipeline/models/test_on_gpu.py::test_the_kernel_equals_the_operators",
    "tests/pipeline/models/test_on_gpu.py::test_packed_layout_is_computed_before_compiled_code",
    "tests/simulated_gpu/work.py",
)


def run(function: Callable[..., None], *arguments: str) -> str:
    """Call a function in a process with simulated devices. Return its output."""
    worker = Worker(function, *arguments, environment={"OMP_NUM_THREADS": "1"}, device="cuda")
    output, _ = worker.communicate(timeout=600)
    assert worker.returncode == 0, output[-10000:]
    return output


def run_pytest(*arguments: str) -> None:
    sys.exit(pytest.main([*arguments]))


def test_gpu_tests_pass_without_a_fault() -> None:
    plugin = ("-p", "tests.simulated_gpu.plugin", "-p", "no:cacheprovider", "-q", "-m", "gpu")
    output = run(run_pytest, *plugin, *ON_GPU)
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in ", output, re.MULTILINE), output[-500:]  # none was skipped


def misuse_the_device() -> None:
    """Misuse the simulated device in each way that it detects. Each misuse leaves a fault or raises an error."""
    from engine import host_memory
    from engine.parallel import comm_hooks
    from tests.simulated_gpu import cuda

    side = torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    with torch.cuda.stream(side):
        y = x * 2  # `side` has not waited for the stream that writes the ones
    assert "reads what" in cuda.faults()[0]
    x = torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    del x
    x = torch.zeros(10, device="cuda")  # the allocator may reuse the freed memory
    assert "freed while another stream" in cuda.faults()[0]
    pinned = torch.zeros(1000, pin_memory=True)
    y.copy_(pinned, non_blocking=True)
    pinned[0] = 1
    assert "was written to while" in cuda.faults()[0]
    pinned.copy_(torch.ones(1000, device="cuda"), non_blocking=True)
    assert pinned[0] != 1  # the copy has not arrived
    torch.cuda.synchronize()
    assert pinned[0] == 1
    pinned = host_memory.pinned(1000, torch.float32)
    assert pinned.is_pinned() and not pinned.any() and host_memory.pinned(0, torch.float32).numel() == 0
    pinned.copy_(torch.ones(1000, device="cuda"), non_blocking=True)
    del pinned
    assert "freed while its copy" in cuda.faults()[0]
    with pytest.raises(RuntimeError, match="same device"):
        y + torch.ones(1000)
    adam = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1.0, "amsgrad": False, "maximize": False}
    with pytest.raises(RuntimeError, match="same device"):
        torch._fused_adamw_([y], [y], [y], [y], [], [torch.zeros(())], **adam)
    graph, y = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        graph.capture_begin()
        z = (y + 1).sum()
        y.zero_()
        graph.capture_end()
    assert y.sum() == 4  # captured calls do not run
    graph.replay()
    assert z == 8 and y.sum() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin(pool=(0, 7))
        with pytest.raises(RuntimeError, match="when stream is capturing"):
            z.item()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
        with pytest.raises(RuntimeError, match="already recording"):
            graph.capture_begin(pool=(0, 7))
    assert "a capture failed" in cuda.faults()[-1]
    cuda.limit(cuda.allocated() + 1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2000, device="cuda")
    cuda.limit()
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    x, y = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    work = comm_hooks.Gather()(y, x, torch.distributed.group.WORLD, async_op=True)
    y.sum()
    assert any("reads what all_gather wrote" in fault for fault in cuda.faults())
    work.wait()
    assert y.sum() == 4 and not cuda.faults()
    with pytest.raises(RuntimeError, match="same device"):
        y + torch.ones(4, device="cuda:1")
    torch.cuda.set_device(1)
    thread = threading.Thread(target=lambda: torch.ones(4, device="cuda"))
    thread.start()
    thread.join()
    assert torch.ones(4, device="cuda").device.index == 1
    assert cuda.faults() == ["memory of device 0 is taken by a process of device 1"]


def test_misuse_of_a_gpu_is_detected() -> None:
    run(misuse_the_device)
