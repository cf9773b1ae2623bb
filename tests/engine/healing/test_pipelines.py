"""A rank of a pipeline that runs out of memory: the schedule comes to its end, and the step ends as planned."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig, OptimizerConfig, initialize
from engine.healing import Portion
from engine.parallel import dist
from tests.engine.parallel.test_pipeline import made, weights
from tests.ranks import run_ranks

STEPS, LENGTH, ROWS = 2, 6, 8
SGD = OptimizerConfig(lr=0.5, name="sgd", options={"momentum": 0.9}, max_grad_norm=1.0)  # Adam would magnify rounding


def collate(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)) if len(rows) else torch.zeros(1, 1, dtype=torch.long)


def batches(step: int, sizes: list[int]) -> list[Portion[Tensor]]:
    """This pipeline's share of the rows, in micro-batches of these sizes."""
    world = dist.world()
    rows = torch.randint(0, 96, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return [
        Portion(part, collate, lambda batch: batch.numel())
        for part in rows[world.data_rank :: world.data_size].split(sizes)
    ]


def counted(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    logits = module(input_ids=ids, use_cache=False).logits[:, :-1].float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return loss, {"tokens": float(ids[:, 1:].numel())}


def rows_of(module: nn.Module, ids: Tensor) -> list[float]:
    logits = module(input_ids=ids, use_cache=False).logits.float()
    return logits.logsumexp(-1).sum(-1).tolist()  # type: ignore[no-any-return]


def fail_at(engine: Engine, where: str, most: int, after: int = 0) -> None:
    """A matrix of this rank's last block fails on micro-batches of more than `most` rows, but the first `after`."""
    names = [name for name, _ in engine.module.named_parameters() if name.endswith(("fc2.weight", "down_proj.weight"))]
    left = [after]

    def fail(rows: int) -> None:
        if rows > most:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def forward(module: nn.Module, args: tuple[Tensor]) -> None:
        if where == "forward":
            fail(args[0].numel() // args[0].shape[-1] // LENGTH)
        elif args[0].requires_grad:
            args[0].register_hook(lambda gradient: fail(gradient.numel() // gradient.shape[-1] // LENGTH))

    engine.module.get_submodule(names[-1].removesuffix(".weight")).register_forward_pre_hook(forward)


def trained(family: str, sizes: list[int], fails: dict[int, str], *, after: int = 0, **layout: Any) -> dict[str, Any]:
    model = made(family, num_hidden_layers=4)
    engine = initialize(model, EngineConfig(**({"dtype": "fp32"} | layout)), optimizer=SGD)
    if dist.world().rank in fails:
        fail_at(engine, fails[dist.world().rank], 2, after)
    count = ROWS * (LENGTH - 1.0)
    updates = [engine.update(batches(step, sizes), counted, count) for step in range(STEPS)]
    scored = engine.score(batches(STEPS, sizes), rows_of)
    return {
        "weights": weights(engine), "losses": [u.loss for u in updates], "norms": [u.grad_norm for u in updates],
        "tokens": [u.sums["tokens"] for u in updates], "times": engine.healer.times, "limit": engine.healer.limit,
        "scored": [row for rows in scored for row in rows],
    }  # fmt: skip


Case = tuple[str, list[int], dict[int, str], dict[str, Any]]
CASES: list[Case] = [
    ("opt", [8], {0: "forward"}, {}),
    ("llama", [2, 3, 3], {1: "forward"}, {"after": 1}),
    ("opt", [3, 3, 2], {0: "backward"}, {"pipeline_schedule": "gpipe"}),
    ("llama", [3, 5], {1: "backward"}, {"activation_checkpointing": True}),
    ("llama", [3, 3, 2], {0: "backward", 1: "backward"}, {"after": 1}),
]
FOUR: list[Case] = [
    ("opt", [2, 1, 1], {}, {"zero_stage": 1}),
    ("opt", [3, 1], {2: "backward"}, {"zero_stage": 1}),
    ("llama", [3, 1], {1: "forward"}, {"zero_stage": 2}),
    ("llama", [1, 3], {0: "backward", 3: "forward"}, {"zero_stage": 0}),
]


def many(cases: list[Case]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    gc.freeze()  # a failure collects garbage: there is none among what was imported
    return [trained(family, sizes, fails, pipeline_parallel=2, **more) for family, sizes, fails, more in cases]


def check(found: list[list[dict[str, Any]]], cases: list[Case]) -> None:
    planned = {family: trained(family, [2, 2, 2, 2], {}) for family in ("opt", "llama")}
    for ranks in found:
        for mine, (family, sizes, fails, more) in zip(ranks, cases, strict=True):
            print(family, sizes, fails, more)
            wanted = planned[family]
            assert mine["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
            assert mine["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
            assert mine["tokens"] == wanted["tokens"]
            assert (mine["times"] >= 1 and mine["limit"] <= 2 * LENGTH) if fails else mine["times"] == 0
            for name, weight in wanted["weights"].items():
                torch.testing.assert_close(mine["weights"][name], weight, atol=1e-5, rtol=1e-4, msg=name)
            if len(mine["scored"]) == ROWS:  # else the other pipeline has some
                assert mine["scored"] == pytest.approx(wanted["scored"], rel=1e-4)


def test_two_ranks() -> None:
    found = run_ranks(many, 2, CASES)
    check(found, CASES)


def test_pipelines_side_by_side() -> None:
    check(run_ranks(many, 4, FOUR), FOUR)
