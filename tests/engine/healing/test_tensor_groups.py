"""A rank of a tensor group that runs out of memory: the group gets through the pass, and the step ends as planned."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig, initialize, token_logprobs
from engine.healing import Portion
from engine.parallel import board, dist, dtensors, meeting, shared_memory
from engine.parallel.board import Entry, SharedBoard
from engine.parallel.last_words import LostMate
from tests.engine.parallel.test_tensor import made
from tests.ranks import run_ranks

STEPS, LENGTH = 2, 6
SGD = OptimizerConfig(lr=0.5, name="sgd", options={"momentum": 0.9}, max_grad_norm=1.0)  # Adam would magnify rounding


def collate(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)) if len(rows) else torch.zeros(1, 1, dtype=torch.long)


def batches(step: int, sizes: list[int]) -> list[Portion[Tensor]]:
    """This group's share of 8 rows, in micro-batches of these sizes."""
    world = dist.world()
    rows = torch.randint(0, 96, (8, LENGTH), generator=torch.Generator().manual_seed(step))
    mine = rows[world.data_rank :: world.data_size]
    return [Portion(part, collate, lambda batch: batch.numel()) for part in mine.split(sizes)]


class Scored(nn.Module):
    """Log-probabilities from the head's own rows, as the stages take them."""

    def __init__(self) -> None:
        super().__init__()
        self.lm: Any = made("qwen3", num_key_value_heads=4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.lm.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        return token_logprobs(hidden.flatten(0, 1), self.lm.lm_head.weight, ids[:, 1:].flatten())[0]


def loss_of(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    logprobs = module(ids)
    return -logprobs.sum(), {"tokens": float(len(logprobs))}


def rows_of(module: nn.Module, ids: Tensor) -> list[float]:
    return module(ids).view(len(ids), -1).sum(1).tolist()  # type: ignore[no-any-return]


class Failing:
    """A matrix of a block fails on micro-batches of more than `most` rows, at `where`, on the chosen ranks. By no hook:
    compiled blocks don't see those.
    """

    def __init__(self, module: nn.Module, fails: dict[int, str], most: int = 2) -> None:
        self.where, self.most = fails.get(dist.world().rank, "nowhere"), most
        layer = "0.self_attn.o_proj" if self.where == "early" else "1.mlp.down_proj"
        matrix = module.get_submodule(f"lm.model.layers.{layer}")
        matrix.forward = partial(self._watched, matrix.forward)

    def _watched(self, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return inner(self._passed(x))

    @torch.compiler.disable
    def _passed(self, x: Tensor) -> Tensor:
        if self.where in ("early", "forward") and len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self._backward)
        return x

    def _backward(self, gradient: Tensor) -> None:
        if len(gradient) > self.most:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")


def trained(sizes: list[int], fails: dict[int, str], *, tensor_parallel: int = 2, **layout: Any) -> dict[str, Any]:
    config = EngineConfig(dtype="fp32", tensor_parallel=tensor_parallel, **layout)
    engine = initialize(Scored(), config, optimizer=SGD)
    Failing(engine.module, fails)
    updates = [engine.update(batches(step, sizes), loss_of, 8.0 * (LENGTH - 1)) for step in range(STEPS)]
    scored = engine.score(batches(STEPS, sizes), rows_of)
    weights = {name: dtensors.full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
    return {
        "weights": weights, "losses": [u.loss for u in updates], "norms": [u.grad_norm for u in updates],
        "tokens": [u.sums["tokens"] for u in updates], "times": engine.healer.times, "limit": engine.healer.limit,
        "scored": [row for rows in scored for row in rows],
    }  # fmt: skip


GATHERED = {  # outputs gathered, inputs split
    "layers.*.mlp.gate_proj": "colwise_gather_output", "layers.*.mlp.up_proj": "colwise_gather_output",
    "layers.*.mlp.down_proj": "rowwise_split_input",
}  # fmt: skip
CASES: list[tuple[list[int], dict[int, str], dict[str, Any]]] = [
    ([8], {0: "forward"}, {}),
    ([3, 3, 2], {1: "backward"}, {"zero_stage": 2}),
    ([5, 3], {0: "backward", 1: "forward"}, {"activation_checkpointing": True}),
    ([3, 5], {0: "forward", 1: "forward"}, {"zero_stage": 3}),
    ([8], {1: "early"}, {"tensor_plan": GATHERED}),
]
COMPILED: list[tuple[list[int], dict[int, str], dict[str, Any]]] = [
    ([5, 3], {1: "backward"}, {"zero_stage": 2, "compile_blocks": True}),
]
FOUR: list[tuple[list[int], dict[int, str], dict[str, Any]]] = [
    ([4], {1: "backward"}, {"zero_stage": 3}),
    ([3, 1], {0: "forward", 3: "backward"}, {"zero_stage": 2}),
    ([3, 1], {0: "early", 1: "backward", 2: "forward"}, {"zero_stage": 1}),
    ([8], {0: "early", 1: "backward", 2: "forward"}, {"tensor_parallel": 4}),
]


def many(cases: list[tuple[list[int], dict[int, str], dict[str, Any]]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    gc.freeze()  # a failure collects garbage: there is none among what was imported
    return [trained(sizes, fails, **layout) for sizes, fails, layout in cases]


def two() -> list[dict[str, Any]]:
    """The cases, one with compiled blocks, and two of them once more as if each rank had a host of its own."""
    found = many(CASES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
        found += many(COMPILED)
        patched.setattr(shared_memory, "share", lambda *_, **__: None)
        del dist._made["board of 2"]
        return [*found, *many(CASES[1:3])]


def same(found: dict[str, Any], wanted: dict[str, Any], limit: int) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    assert found["tokens"] == wanted["tokens"]
    assert found["times"] >= 1 and found["limit"] <= limit
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=1e-4, rtol=1e-4, msg=name)


def test_two_ranks() -> None:
    planned = trained([2, 2, 2, 2], {}, tensor_parallel=1)
    assert planned["times"] == 0
    for found in run_ranks(two, 2):
        for each, (sizes, fails, layout) in zip(found, [*CASES, *COMPILED, *CASES[1:3]], strict=True):
            print(sizes, fails, layout)
            same(each, planned, 2 * LENGTH)
            assert each["scored"] == pytest.approx(planned["scored"], rel=1e-4)


def test_groups_and_shares_of_the_data() -> None:
    planned = trained([2, 2, 2, 2], {}, tensor_parallel=1)
    for found in run_ranks(many, 4, FOUR):
        for each, (sizes, fails, layout) in zip(found, FOUR, strict=True):
            print(sizes, fails, layout)
            same(each, planned, 2 * LENGTH)


def test_a_board_is_read_place_by_place() -> None:
    memory = torch.zeros(3 * board.PLACES, dtype=torch.int64)
    first, second, third = (SharedBoard(memory, rank, 3) for rank in range(3))
    sums = Entry(board.SUM, group=2, dtype=1, numbers=2**33 + 1)
    for lap in range(2):
        third.write(sums)
        second.write(sums)
        assert first.follow() == sums
        third.write(Entry(board.SHARD))
        second.write(Entry(board.FAILED))  # as `follow` does
        assert first.follow() == Entry(board.SHARD)
        third.write(Entry(board.FAILED))
        second.write(Entry(board.FAILED))
        assert first.follow() == Entry(board.FAILED), "nobody is left"
        for each in (first, second, third):
            assert each.place == lap * board.PLACES + 3
            each.place = board.PLACES  # the next lap: what stands there is old


def test_nobody_waits_for_a_mate_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOOK", 0.01)
    with subprocess.Popen([sys.executable, "--version"], stdout=subprocess.DEVNULL) as mate:
        first = SharedBoard(torch.zeros(2 * board.PLACES, dtype=torch.int64), 0, 2, [os.getpid(), mate.pid])
        with pytest.raises(LostMate):
            first.follow()
