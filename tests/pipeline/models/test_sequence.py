"""Sequence parallelism gives the losses, gradients and weights of one rank with the full rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, OptimizerConfig
from engine.parallel import dist, dtensors
from pipeline.config.schema import EngineSettings
from pipeline.config.stage_sections import LoraConfig
from pipeline.data.batch import Documents
from pipeline.errors import UserError
from pipeline.models.build import EngineChoice, build_policy, build_scorer
from pipeline.models.checks import verify
from tests.pipeline.models.tiny import config_of, ids_of, source_drawn
from tests.ranks import run_ranks

STEPS, COUNT = 1, 50.0
LENGTHS = ((7, 4, 12, 1, 5), (9, 3, 3), (6, 1), (2, 15))  # four rows with lengths that the ranks do not divide
PREFIXES = ((None, 0, 0, None, 3), (None, 0, 0), (None, None), (None, 0))
SGD = OptimizerConfig(lr=0.1, name="sgd", options={"momentum": 0.9}, max_grad_norm=1.0)  # Adam would magnify rounding
ONE_BIT = OptimizerConfig(lr=1e-3, name="onebitadam", eps=1e-3)  # averages gradients itself
Row = tuple[Tensor, Documents]
Told = tuple[list[float], list[float], dict[str, Tensor]]


def rows(step: int, *, prefixes: bool) -> list[Row]:
    """Return this group's share of a step."""
    world = dist.world()
    made = [
        (ids_of(1, sum(lengths), seed=10 * step + place), Documents(lengths, PREFIXES[place] if prefixes else ()))
        for place, lengths in enumerate(LENGTHS)
    ]
    return made[world.data_rank :: world.data_size]


def policy_loss(module: nn.Module, row: Row) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Weight each token differently and add its entropy. Short rows count only the last token, so a rank has none."""
    ids, documents = row
    counts = [place for place in range(ids.shape[1]) if place not in documents.starts]
    scored = torch.tensor(counts if len(documents.lengths) > 2 else counts[-1:])
    logprobs, entropies = module(ids, scored, temperature=0.8, documents=documents)
    weights = torch.linspace(0.5, 1.5, len(scored))
    return -(weights * logprobs + 0.1 * weights.flip(0) * entropies).sum(), {"tokens": float(len(scored))}


def value_loss(module: nn.Module, row: Row) -> tuple[Tensor, dict[str, float | Tensor]]:
    ids, documents = row
    values = module(ids, documents=documents)
    assert values.shape == ids.shape
    return (values - ids / 50).square().sum(), {"tokens": float(ids.numel())}


def built(
    family: str, *, scorer: bool = False, lora: int = 0, optimizer: OptimizerConfig = SGD,
    changes: dict[str, Any] | None = None, **layout: Any,
) -> Engine:  # fmt: skip
    choice = EngineChoice(
        EngineSettings(**({"dtype": "fp32"} | layout)), optimizer, LoraConfig(rank=lora) if lora else None
    )
    source = source_drawn(config_of(family, **(changes or {})))
    engine = build_scorer(source, choice, pad_id=0) if scorer else build_policy(source, choice)
    verify(engine, max_length=32)
    return engine


def advance(engine: Engine, step: int, *, scorer: bool, prefixes: bool = False) -> tuple[float, float]:
    update = engine.update(rows(step, prefixes=prefixes), value_loss if scorer else policy_loss, COUNT)
    assert update.sums["tokens"] == (68 if scorer else 24 + 12 + 1 + 1), "each group must count once"
    return update.loss, update.grad_norm


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: dtensors.full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}


def trained(family: str, *, scorer: bool = False, prefixes: bool = False, **rest: Any) -> Told:
    engine = built(family, scorer=scorer, **rest)
    losses, norms = zip(
        *(advance(engine, step, scorer=scorer, prefixes=prefixes) for step in range(STEPS)), strict=True
    )
    return [*losses], [*norms], weights(engine)


def same(actual: Told, expected: Told, tolerance: float = 1e-5) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=tolerance)
    assert actual[1] == pytest.approx(expected[1], rel=tolerance)
    for name, weight in expected[2].items():
        torch.testing.assert_close(
            actual[2][name], weight, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


WINDOW = {"sliding_window": 5}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("opt", {"zero_stage": 0, "activation_checkpointing": True}),
    ("cohere", {"zero_stage": 3, "lora": 4, "activation_checkpointing": True}),  # scales its logits after the head
    ("gemma2", {"zero_stage": 3, "changes": WINDOW}),
    ("gemma3_text", {"zero_stage": 1, "changes": WINDOW | MIXED}),
    ("qwen3_moe", {"zero_stage": 2, "offload_optimizer": "cpu"}),
    ("llama", {"scorer": True, "prefixes": True, "zero_stage": 3}),
    ("llama", {"optimizer": ONE_BIT}),
]
GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("opt", {"scorer": True, "prefixes": True, "shard_ranks": 2, "zero_stage": 2})
]
WIDE: list[tuple[str, dict[str, Any]]] = [("llama", {"zero_stage": 3})]


def all_cases(ranks: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Told]:
    torch.set_num_threads(1)
    return [trained(family, sequence_parallel=ranks, **rest) for family, rest in cases]


def collect_refusals() -> list[str]:
    output = []
    three = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    for family, changes in (("llama", three), ("bloom", {})):
        with pytest.raises((UserError, ValueError)) as problem:
            built(family, changes=changes, sequence_parallel=2)
        output.append(str(problem.value))
    engine = built("llama", sequence_parallel=2)
    with pytest.raises(AssertionError, match="sequence parallelism trains only packed rows"):
        engine(ids_of(1, 4), torch.tensor([1]))
    dist.set_parallelism()
    with pytest.raises(ValueError, match="another engine of this process"):
        engine.backward(torch.zeros(()))
    return output


def two() -> tuple[list[Told], list[str]]:
    return all_cases(2, CASES), collect_refusals()


def test_two_ranks_divide_rows_or_refuse() -> None:
    single = all_cases(1, CASES)
    for results, output in run_ranks(two, 2):
        for actual, expected, case in zip(results, single, CASES, strict=True):
            print(case)
            same(actual, expected)
        heads, family = output
        assert heads == "sequence_parallel=2 does not divide the 3 attention heads; 1, 3 do"
        assert "Bloom" in family and "engine.activation_checkpointing=true" in family


def four(folder: str) -> dict[str, Any]:
    """Train two groups of two and one group of four. Load one rank's checkpoint and save another."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"groups": all_cases(2, GROUPS)}
    engine = built("llama", zero_stage=3, sequence_parallel=2)
    engine.load(f"{folder}/alone")
    results["loaded"] = (*advance(engine, 1, scorer=False), weights(engine))
    engine.save(f"{folder}/groups")
    results["wide"] = all_cases(4, WIDE)
    return results


def test_groups_divide_data_and_exchange_checkpoints(tmp_path: Path) -> None:
    single = all_cases(1, [*GROUPS, *WIDE])
    engine = built("llama")
    advance(engine, 0, scorer=False)
    engine.save(tmp_path / "alone")
    once = (*advance(engine, 1, scorer=False), weights(engine))
    for actual in run_ranks(four, 4, str(tmp_path)):
        for results, expected in zip([*actual["groups"], *actual["wide"]], single, strict=True):
            same(results, expected)
        same(actual["loaded"], once)
    back = built("llama")
    back.load(tmp_path / "groups")
    same((*advance(back, 2, scorer=False), weights(back)), (*advance(engine, 2, scorer=False), weights(engine)))
