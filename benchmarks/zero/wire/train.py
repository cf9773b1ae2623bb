"""One rank's training of a small language model on a made-up language: `VARIANT STEPS`. Prints one JSON object.

The language is a Markov chain over words: each has eight successors, so that there is something to learn, and a floor
(ln 8 = 2.08 nats a word) that no model gets below.
"""

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from engine import OptimizerConfig
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.batch import TokenBatch, true_indices
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.source import resolve
from step1_sft.train import loss_of

WORDS, SUCCESSORS, ROWS, LENGTH = 512, 8, 16, 128
FREEZE_STEP = 60
SHAPE = {
    "model_type": "opt",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_dim": 1024,
    "word_embed_proj_dim": 256,
    "vocab_size": WORDS,
    "max_position_embeddings": LENGTH,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"zero_stage": 2},
    "gather8": {"zero_stage": 2, "compress": "gather8"},
    "reduce8": {"zero_stage": 2, "compress": "reduce8"},
    "both": {"zero_stage": 2, "compress": "both"},
    "adam": {"zero_stage": 0},
    "onebitadam": {"zero_stage": 0},
}


def main(variant: str, steps: int) -> None:
    """Train, and print losses and what the last step sent."""
    torch.set_num_threads(1)
    world = dist.start("wire", device="cpu")
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=20, total_steps=steps, schedule="linear", betas=(0.9, 0.99))
    if variant == "onebitadam":
        optimizer = replace(optimizer, name=variant, options={"freeze_step": FREEZE_STEP})
    settings = EngineSettings.model_validate({"dtype": "bf16", **VARIANTS[variant]})
    model = ModelConfig(name="small", weights="random", architecture=SHAPE)
    engine = build_policy(resolve(model, seed=1), EngineChoice(settings, optimizer))
    losses: list[float] = []
    sent: dict[str, int] = {}
    for step in range(steps):
        ids = sentences(step)[world.rank :: world.size]
        counts = torch.ones_like(ids, dtype=torch.bool)
        counts[:, 0] = False
        update = engine.update([TokenBatch(ids, true_indices(counts))], loss_of, ROWS * (LENGTH - 1))
        losses.append(update.loss)
        sent = asdict(update.sent)
    print(json.dumps({"losses": losses, "sent": sent}), flush=True)
    dist.stop()


def sentences(step: int) -> Tensor:
    """The global batch of a step: (ROWS, LENGTH) long."""
    successors = torch.randint(WORDS, (WORDS, SUCCESSORS), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    words = [torch.randint(WORDS, (ROWS,), generator=generator)]
    for _ in range(LENGTH - 1):
        words.append(successors[words[-1], torch.randint(SUCCESSORS, (ROWS,), generator=generator)])
    return torch.stack(words, 1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
