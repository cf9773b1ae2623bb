"""One rank's steps on long rows, shared out and apart, in turn: `ROUNDS`. Prints one JSON object."""

import json
import sys
import time
from typing import Any

import torch

from engine import Engine, OptimizerConfig
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.batch import TokenBatch
from pipeline.data.documents import Documents
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.source import resolve
from step1_sft.train import loss_of

TOKENS, ROWS, VOCABULARY = 4096, 2, 4096
SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": TOKENS,
}
WAYS = {"shared": 2, "apart": 1}


def main(rounds: int) -> None:
    """Train both ways, and print seconds, bytes sent and held."""
    torch.set_num_threads(1)
    dist.start("sequence", device="cpu")
    engines = {name: _engine(ranks) for name, ranks in WAYS.items()}
    found: dict[str, Any] = {name: {"seconds": []} for name in WAYS}
    for round_ in range(rounds + 1):
        for name, engine in engines.items():
            dist.set_parallelism(sequence=WAYS[name])
            dist.barrier()
            began = time.perf_counter()
            update = engine.update(_rows(), loss_of, ROWS * (TOKENS - 1))
            if round_:
                found[name]["seconds"].append(time.perf_counter() - began)
            found[name] |= {
                "sent": update.sent.total,
                "activations": engine.memory_tracker.peaks["train"]["activations"],
            }
    print(json.dumps({"tokens": TOKENS, **found}), flush=True)
    dist.stop()


def _engine(ranks: int) -> Engine:
    settings = EngineSettings(dtype="bf16", zero_stage=3, sequence_parallel=ranks)
    source = resolve(ModelConfig(name="small", weights="random", architecture=SHAPE), seed=1)
    engine = build_policy(source, EngineChoice(settings, OptimizerConfig(lr=1e-4)))
    assert verify(engine, max_length=TOKENS).packing
    return engine


def _rows() -> list[TokenBatch]:
    """This rank's, or its group's."""
    world = dist.world()
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    scored, documents = torch.arange(1, TOKENS), Documents((TOKENS,))
    return [TokenBatch(row[None], scored, documents) for row in ids[world.data_rank :: world.data_size]]


if __name__ == "__main__":
    main(int(sys.argv[1]))
