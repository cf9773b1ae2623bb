"""Loss curves of every ZeRO stage and offload tier on 1, 2 and 4 ranks.

`parity` compares fp32 curves with one unsharded process of plain PyTorch. `parity16` compares the curves of bf16 and of
fp16 with stage 0 on one rank in the same precision, and with plain PyTorch in fp32.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, OPTConfig

from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from benchmarks.zero.nvme import nvme_folder
from engine import Engine, EngineConfig, OptimizerConfig
from engine.parallel import dist

RANKS = (1, 2, 4)
STEPS, ROWS, LENGTH, MICRO_BATCHES = 10, 8, 24, 2
CONFIG: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "num_hidden_layers": 3,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
OPTIMIZER = OptimizerConfig(lr=1e-3, schedule="constant", weight_decay=0.1, max_grad_norm=1.0)


def measure(rounds: int, case: str) -> Result:
    """Return the largest relative difference of a loss. Runs once: the curves are the same in every round."""
    largest, detail = _fp32() if case == "parity" else _half_precision()
    return Result(
        bench="zero",
        case=case,
        ours=largest,
        unit="largest relative gap of a loss",
        lower_is_better=True,
        detail=detail,
    )


def _fp32() -> tuple[float, dict[str, Any]]:
    """Return the largest difference from plain PyTorch, and the detail of the result."""
    curves = {ranks: run_ranks(__name__, ["fp32"], ranks)[0] for ranks in RANKS}
    plain = curves[1].pop("plain")
    differences = {
        f"{layout} x{ranks}": relative_difference(losses, plain)
        for ranks, by_layout in curves.items()
        for layout, losses in by_layout.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    detail = {"at_most": 1e-5, "worst": worst, "layouts": len(differences), "steps": len(plain), "losses": plain}
    return differences[worst], detail


def _half_precision() -> tuple[float, dict[str, Any]]:
    """Return the largest difference from stage 0 on one rank, and the detail of the result."""
    detail: dict[str, float] = {}
    for dtype in ("bf16", "fp16"):
        curves = {ranks: run_ranks(__name__, [dtype], ranks)[0] for ranks in RANKS}
        fp32 = curves[1].pop("plain")
        base = curves[1]["zero0 none"]
        all_losses = [losses for by_layout in curves.values() for losses in by_layout.values()]
        detail[f"{dtype}_among_layouts"] = max(relative_difference(losses, base) for losses in all_losses)
        detail[f"{dtype}_from_fp32"] = max(relative_difference(losses, fp32) for losses in all_losses)
    return max(detail["bf16_among_layouts"], detail["fp16_among_layouts"]), detail


def relative_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference between two curves."""
    return max(abs(loss - expected) / abs(expected) for loss, expected in zip(losses, reference, strict=True))


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and engine fields of every stage with every tier. At stage 3 the parameters are offloaded too."""
    for stage in range(4):
        for tier in ("none", "cpu", "nvme"):
            fields = {
                "zero_stage": stage,
                "offload_optimizer": tier,
                "offload_parameters": tier if stage == 3 else "none",
                "sub_group_size": 4096,
                "nvme_path": nvme_folder(),
            }
            yield f"zero{stage} {tier}", fields


def main(dtype: str) -> None:
    """Train one rank with each layout; print the losses by layout as JSON. A single rank adds plain PyTorch."""
    torch.set_num_threads(1)
    world = dist.start("curves", device="cpu")
    curves = {name: _losses(dtype, layout) for name, layout in layouts()}
    if world.size == 1:
        curves["plain"] = _plain_losses()
    print(json.dumps(curves), flush=True)
    dist.stop()


def _losses(dtype: str, layout: dict[str, Any]) -> list[float]:
    world = dist.world()
    engine = Engine(_model(), EngineConfig(dtype=dtype, **layout), optimizer=OPTIMIZER)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        local_rows = _tokens(step)[world.rank :: world.size]
        batches = local_rows.chunk(min(MICRO_BATCHES, len(local_rows)))
        losses.append(engine.update(list(batches), _loss, ROWS * (LENGTH - 1)).loss)
    return losses


def _plain_losses() -> list[float]:
    """Train with PyTorch alone: AdamW, gradient clipping, no weight decay on vectors."""
    module, losses = _model(), []
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas)
    for step in range(STEPS):
        loss = _loss(module, _tokens(step))[0] / (ROWS * (LENGTH - 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _model() -> nn.Module:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(OPTConfig(**CONFIG))  # type: ignore[no-any-return]


def _tokens(step: int) -> Tensor:
    """Return token ids (ROWS, LENGTH). Two batches alternate, so that the model can learn them."""
    step %= 2
    return torch.randint(4, 200, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def _loss(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    logits = module(input_ids=ids).logits[:, :-1].float()
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="sum"), {}


if __name__ == "__main__":
    main(sys.argv[1])
