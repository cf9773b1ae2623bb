"""A rank of a sequence group that runs out of memory: the group gets through the pass, and the step ends as planned."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine
from engine.healing import Portion
from engine.parallel import dist, dtensors
from pipeline.data.documents import Documents
from pipeline.models import attention
from tests.pipeline.models.test_sequence import Row, built, same
from tests.pipeline.models.tiny import ids_of
from tests.ranks import run_ranks

LENGTH, MOST = 6, 12  # tokens of a sequence; of a row that still fits
CASES: list[tuple[list[int], dict[int, str], dict[str, Any]]] = [
    ([8], {1: "attention"}, {"zero_stage": 3}),
    ([5, 3], {0: "forward", 1: "backward"}, {"zero_stage": 2, "activation_checkpointing": True}),
    ([3, 5], {0: "backward"}, {}),
]


def collate(sequences: Sequence[Tensor]) -> Row:
    if not len(sequences):
        return torch.zeros(1, 1, dtype=torch.long), Documents((1,))
    return torch.cat([*sequences])[None], Documents((LENGTH,) * len(sequences))


def portions(step: int, sizes: list[int]) -> list[Portion[Row]]:
    """This group's share of 8 sequences, in rows of so many."""
    world = dist.world()
    mine = ids_of(8, LENGTH, seed=step)[world.data_rank :: world.data_size]
    return [Portion(part, collate, lambda row: row[0].numel()) for part in mine.split(sizes)]


def loss_of(module: nn.Module, row: Row) -> tuple[Tensor, dict[str, float | Tensor]]:
    ids, documents = row
    scored = torch.tensor([place for place in range(ids.shape[1]) if place % LENGTH], dtype=torch.long)
    return -module(ids, scored, documents=documents)[0].sum(), {}


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def fail(engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second block's MLP, on the way there or back, or between the two exchanges of its attention."""
    within = attention._within

    def attended(documents: Documents, *rest: Any) -> Tensor:
        if sum(documents.lengths) > MOST:
            out_of_memory()
        return within(documents, *rest)

    def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if output.shape[1] > MOST // 2 and where == "forward":
            out_of_memory()
        if output.shape[1] > MOST // 2 and output.requires_grad:
            output.register_hook(out_of_memory)

    if where == "attention":
        monkeypatch.setattr(attention, "_within", attended)
    elif where != "nowhere":
        engine.module.get_submodule("lm.model.layers.1.mlp.act_fn").register_forward_hook(hook)


def trained(sizes: list[int], fails: dict[int, str], **layout: Any) -> dict[str, Any]:
    engine = built("llama", **layout)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail(engine, fails.get(dist.world().rank, "nowhere"), monkeypatch)
        updates = [engine.update(portions(step, sizes), loss_of, 40.0) for step in range(2)]
    weights = {name: dtensors.full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
    told = ([u.loss for u in updates], [u.grad_norm for u in updates], weights)
    return {"told": told, "times": engine.healer.times, "limit": engine.healer.limit}


def all_cases() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    gc.freeze()  # a failure collects garbage: there is none among what was imported
    return [trained(sizes, fails, sequence_parallel=2, **layout) for sizes, fails, layout in CASES]


def test_a_rank_that_fails_takes_part_until_the_end() -> None:
    planned = trained([2, 2, 2, 2], {})
    assert planned["times"] == 0
    for found in run_ranks(all_cases, 2):
        for each, case in zip(found, CASES, strict=True):
            print(case)
            same(each["told"], planned["told"], 1e-4)
            assert each["times"] >= 1 and each["limit"] <= MOST
