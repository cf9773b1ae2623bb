"""Loss curves of a tiny language model over ZeRO stages and tiers, on this process's ranks: `DTYPE`.

Prints one JSON object: the losses by layout, and with one rank those of plain PyTorch in fp32 beside them.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, OPTConfig

from benchmarks.zero.tiers.disk import folder
from engine import Engine, EngineConfig, OptimizerConfig
from engine.parallel import dist

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


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every stage with every tier: the optimizer's from stage 0 on, the parameters' too at stage 3."""
    for stage in range(4):
        for tier in ("none", "cpu", "nvme"):
            shards = tier if stage == 3 else "none"
            yield (
                f"zero{stage} {tier}",
                {
                    "zero_stage": stage,
                    "offload_optimizer": tier,
                    "offload_parameters": shards,
                    "sub_group_size": 4096,
                    "nvme_path": folder(),
                },
            )


def model() -> nn.Module:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(OPTConfig(**CONFIG))  # type: ignore[no-any-return]


def tokens(step: int) -> Tensor:
    """Two batches in turn, so that there is something to learn."""
    step %= 2
    return torch.randint(4, 200, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    logits = module(input_ids=ids).logits[:, :-1].float()
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="sum"), {}


def curve(dtype: str, layout: dict[str, Any]) -> list[float]:
    world = dist.world()
    engine = Engine(model(), EngineConfig(dtype=dtype, **layout), optimizer=OPTIMIZER)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        mine = tokens(step)[world.rank :: world.size]
        batches = mine.chunk(min(MICRO_BATCHES, len(mine)))
        losses.append(engine.update(list(batches), loss_of, ROWS * (LENGTH - 1)).loss)
    return losses


def plain() -> list[float]:
    """AdamW, clipping, no decay on vectors: PyTorch alone."""
    module, losses = model(), []
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas)
    for step in range(STEPS):
        loss = loss_of(module, tokens(step))[0] / (ROWS * (LENGTH - 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(dtype: str) -> None:
    torch.set_num_threads(1)
    world = dist.start("curves", device="cpu")
    found = {name: curve(dtype, layout) for name, layout in layouts()}
    if world.size == 1:
        found["plain"] = plain()
    print(json.dumps(found), flush=True)
    dist.stop()


if __name__ == "__main__":
    main(sys.argv[1])
