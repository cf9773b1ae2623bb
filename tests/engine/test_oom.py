"""Out-of-memory errors are recognised, and the search for the micro-batch size leaves the engine's state unchanged."""

import gc
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig
from engine.config import Tier
from engine.engine import Engine
from engine.oom import PassOutOfMemory, find_micro_batch_size, is_out_of_memory
from engine.parallel import dist
from tests.engine.test_passes import STEPS, WAYS, WIDTH, Failing, Net, Rows, batches, engine_of, loss, trained
from tests.ranks import run_ranks

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
]
OTHERS = [
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx( handle, opa, opb, m, n, k`"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("out of memory while one sequence is decoded"),
    torch.distributed.DistBackendError("NCCL error: unhandled cuda error 'out of memory'"),
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_errors_that_mean_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_errors_that_mean_something_else(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("where", "call"), WAYS)
def test_a_pass_that_runs_out_of_memory_ends_the_update(where: str, call: int, stage: int) -> None:
    engine = engine_of(stage)
    with Failing(where, 5, call=call), pytest.raises(PassOutOfMemory) as raised:
        engine.update(batches(0, [16]), loss, 16.0)
    assert not raised.value.holds_graphs and isinstance(raised.value.__cause__, RuntimeError | MemoryError)
    with Failing("forward", 5), pytest.raises(PassOutOfMemory):
        engine.score(batches(0, [16]), lambda module, rows: list(module(rows.x)))


def test_other_errors_of_a_pass_are_not_changed() -> None:
    def wrong(module: nn.Module, batch: Rows) -> tuple[Tensor, dict[str, float | Tensor]]:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        engine_of(2).update(batches(0, [16]), wrong, 1.0)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("where", "call"), WAYS)
def test_the_search_for_the_size_changes_no_state(where: str, call: int, stage: int) -> None:
    """The search restores gradients, buffers and random state, so the following updates are equal bit for bit."""
    expected = trained(stage, [16], shares=False, drop=0.5)
    tried: list[int] = []

    def dry_run(rows: int) -> None:
        tried.append(rows)
        engine.dry_run(Rows(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))), loss)

    engine = engine_of(stage, drop=0.5)
    torch.manual_seed(5)
    with Failing(where, 5, call=call):
        assert find_micro_batch_size(dry_run, 16, minimum=1) == 4
    assert tried == [16, 8, 4]
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    updates = [engine.update(batches(step, [16]), loss, 16.0) for step in range(STEPS)]
    assert [update.loss for update in updates] == expected["losses"]
    assert engine.module.seen.item() == expected["seen"]


def test_sizes_below_the_minimum_are_not_tried() -> None:
    tried: list[int] = []

    def dry_run(rows: int) -> None:
        tried.append(rows)
        raise PassOutOfMemory("no memory")

    with pytest.raises(PassOutOfMemory):
        find_micro_batch_size(dry_run, 16, minimum=6)
    assert tried == [16, 8, 6]


def on_two_ranks() -> tuple[list[float], list[float], str]:
    """Return the losses without and with a dry run before the first step, and the error of a failing dry run."""
    torch.set_num_threads(1)
    gc.freeze()
    expected = trained(2, [8], shares=False, drop=0.5)["losses"]
    engine = engine_of(2, drop=0.5)
    torch.manual_seed(5 + dist.world().rank)
    engine.dry_run(batches(7, [8])[0], loss)
    losses = [engine.update(batches(step, [8]), loss, 16.0).loss for step in range(STEPS)]
    with Failing("forward", 2), pytest.raises(PassOutOfMemory) as raised:
        find_micro_batch_size(lambda rows: engine.dry_run(batches(7, [rows])[0], loss), 8, minimum=1)
    return expected, losses, str(raised.value)


def test_two_ranks_dry_run_and_stop_after_a_failure() -> None:
    for expected, losses, reason in run_ranks(on_two_ranks, 2):
        assert losses == expected
        assert reason == "CUDA out of memory. Tried to allocate 20.00 MiB"


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("failure", ["memory", "before_step"])
def test_an_update_that_fails_leaves_no_gradients(failure: str, offload: Tier) -> None:
    def made() -> Engine:
        torch.manual_seed(3)
        return Engine(Net(), EngineConfig(dtype="fp32", offload_optimizer=offload), optimizer=OptimizerConfig(lr=0.05))

    def refuse(_: Mapping[str, float]) -> None:
        raise RuntimeError("refused")

    expected, engine = made().update(batches(0, [16]), loss, 16.0), made()
    if failure == "memory":
        with Failing("forward", 5), pytest.raises(PassOutOfMemory):
            engine.update(batches(1, [5, 11]), loss, 16.0)
    else:
        with pytest.raises(RuntimeError, match="refused"):
            engine.update(batches(1, [16]), loss, 16.0, before_step=refuse)
    assert engine.update(batches(0, [16]), loss, 16.0).grad_norm == expected.grad_norm
