"""Adapters on frozen weights that exist once, in 16 bits: bytes, losses by rank and stage, checkpoints, exports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from engine import Engine
from engine.parallel import dist
from pipeline.config.stage_sections import LoraConfig
from pipeline.models.build import build_policy
from pipeline.models.export import export_policy
from tests.pipeline.models.test_export import tokenizer
from tests.pipeline.models.tiny import after_first, config_of, ids_of, language_model, source_drawn, source_in, trained
from tests.ranks import run_ranks

LORA = LoraConfig(rank=2, alpha=4.0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero2": {"zero_stage": 2},
    "host": {"zero_stage": 3, "offload_parameters": "cpu"},
}


def built(folder: Path, dtype: str, **layout: Any) -> Engine:
    choice = trained(dtype, lr=0.02, lora=LORA)
    settings = choice.settings.model_copy(update=layout)
    return build_policy(source_in(folder / "base"), replace(choice, settings=settings), generates=True)


def losses(engine: Engine, steps: int = 3) -> list[float]:
    """Take steps of two micro-batches on the same four rows, and return their losses."""
    rows = ids_of(4, 9, seed=4)[dist.world().rank :: dist.world().size]
    return [
        engine.update(rows.chunk(2), lambda module, batch: (-module(batch, after_first(batch))[0].sum(), {}), 32).loss
        for _ in range(steps)
    ]


def sizes(engine: Engine) -> tuple[int, int]:
    """Return the numbers of frozen and of trained parameters."""
    parameters = list(engine.module.parameters())
    learning = sum(p.numel() for p in parameters if p.requires_grad)
    return sum(p.numel() for p in parameters) - learning, learning


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    language_model(config_of("llama")).save_pretrained(made / "base")
    return made


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_one_rank_holds_frozen_weights_once(dtype: str, folder: Path) -> None:
    engine = built(folder, dtype)
    losses(engine)
    frozen, learning = sizes(engine)
    peaks = engine.memory_tracker.peaks["train"]
    assert (peaks["parameters"], peaks["gathered"]) == (2 * frozen + 4 * learning, 2 * learning)
    live = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    with engine.generating() as generator:  # the parity check compares it with the plain forward
        shared = {p.data_ptr() for p in generator.module.parameters()} & {p.data_ptr() for p in live.values()}
    merged = [p for name, p in live.items() if name.endswith(".base_layer.weight")]
    assert len(shared) == len(live) - len(merged) > 0
    assert engine.flip.bytes == 2 * sum(p.numel() for p in merged)


def test_random_weights_are_the_same_with_and_without_adapters() -> None:
    """The chat compares with the base model, which it builds without adapters."""
    source = source_drawn(config_of("llama"))
    plain, adapted = (
        dict(build_policy(source, choice).module.named_parameters()) for choice in (trained(), trained(lora=LORA))
    )
    weights = {name.replace(".base_layer.", "."): p for name, p in adapted.items() if ".lora_" not in name}
    assert weights.keys() == plain.keys() and len(adapted) > len(plain)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """Train with each layout; generate, save, export, and continue in another engine."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        engine = built(folder, "bf16", **layout)
        found: dict[str, Any] = {"losses": losses(engine), "bytes": engine.memory_tracker.peaks["train"]}
        with engine.generating():
            pass
        engine.save(folder / name)
        export_policy(engine, source_in(folder / "base"), tokenizer(), folder / f"{name}-out", lora=LORA)
        again = built(folder, "bf16", **layout)
        again.load(folder / name)
        found |= {"on": losses(engine, 2), "again": losses(again, 2)}
        results[name] = found
    return results


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[float], list[float], tuple[int, int]]:
    """Return the losses of one rank in bf16 and in fp32, and the numbers of its parameters."""
    engine = built(folder, "bf16")
    return losses(engine), losses(built(folder, "fp32")), sizes(engine)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_hold_shards_in_bf16_and_learn_what_one_rank_learns(
    name: str, ranks: list[dict[str, Any]], alone: tuple[list[float], list[float], tuple[int, int]]
) -> None:
    """The loss falls by 15 % in three steps. The tolerances are the rounding of bf16."""
    expected, in_fp32, (frozen, learning) = alone
    for found in (rank[name] for rank in ranks):
        assert found["losses"] == pytest.approx(expected, rel=0.01)
        assert found["losses"] == pytest.approx(in_fp32, rel=0.02)
        assert found["losses"][2] < 0.9 * found["losses"][0]
        assert found["again"] == found["on"]
        shards = 1 if name == "zero0" else 2
        masters = (2 * frozen + 4 * learning) // shards
        if name == "host":
            assert found["bytes"]["host"] < masters + 13 * learning // shards  # moments, their steps, and gradients
        else:
            assert found["bytes"]["parameters"] == masters


@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpoints_hold_adapters_and_exports_are_rounded_once(
    name: str, folder: Path, ranks: list[dict[str, Any]]
) -> None:
    stored = HuggingFaceStorageReader(str(folder / name)).read_metadata().state_dict_metadata
    assert stored and all(".lora_" in key for key in stored)
    base = load_file(folder / "base" / "model.safetensors")
    merged = load_file(folder / f"{name}-out" / "model.safetensors")
    factors = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    for key, weight in merged.items():
        exact: Tensor = base[key].bfloat16().double()
        prefix = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in factors:
            down, up = (factors[f"{prefix}.lora_{part}.weight"].double() for part in "AB")
            exact = exact + LORA.alpha / LORA.rank * up @ down
            assert (exact - base[key]).abs().max() > 0.01
        assert weight.dtype == torch.bfloat16
        assert ((weight.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all(), key
