"""Sequence parallelism against data parallelism on the same long rows: seconds, activation bytes, bytes sent.

Two ranks train on two rows per step in bf16 with ZeRO-3. With data parallelism each rank processes one row. With
sequence parallelism both ranks process both rows, one after the other. Activation bytes are the memory tracker's count
for the largest micro-batch. They do not depend on the machine.
"""

import json
import sys
import time
from typing import Any

import torch

from benchmarks.measure import median, spread
from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from engine import Engine, OptimizerConfig
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.batch import Documents, TokenBatch
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.source import resolve
from step1_sft.train import loss_of

RANKS = 2
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
GROUP_SIZES = {"sequence_parallel": RANKS, "data_parallel": 1}  # ranks of a sequence group


def measure(rounds: int) -> Result:
    """Return the seconds of a step; the detail has activation bytes and bytes sent."""
    ranks = run_ranks(__name__, [str(rounds)], RANKS)
    seconds = {
        name: [max(times) for times in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)]
        for name in GROUP_SIZES
    }
    activations = {name: max(rank[name]["activations"] for rank in ranks) for name in GROUP_SIZES}
    sent = {name: max(rank[name]["sent"] for rank in ranks) for name in GROUP_SIZES}
    return Result(
        bench="zero",
        case="sequence",
        ours=median(seconds["sequence_parallel"]),
        peer=median(seconds["data_parallel"]),
        unit="s/step",
        lower_is_better=True,
        detail={
            "peer": "data parallel",
            "tokens_a_row": TOKENS,
            "activations_MB": {name: size / 1e6 for name, size in activations.items()},
            "MB_sent_a_step": {name: size / 1e6 for name, size in sent.items()},
            "spread": {name: spread(values) for name, values in seconds.items()},
        },
    )


def main(rounds: int) -> None:
    """Train with both layouts in turn on one rank. Print seconds, bytes sent and activation bytes as JSON."""
    torch.set_num_threads(1)
    dist.start("sequence", device="cpu")
    engines = {name: _engine(ranks) for name, ranks in GROUP_SIZES.items()}
    figures: dict[str, Any] = {name: {"seconds": []} for name in GROUP_SIZES}
    for round_ in range(rounds + 1):
        for name, engine in engines.items():
            dist.set_parallelism(sequence=GROUP_SIZES[name])
            dist.barrier()
            start = time.perf_counter()
            update = engine.update(_local_rows(), loss_of, ROWS * (TOKENS - 1))
            if round_:
                figures[name]["seconds"].append(time.perf_counter() - start)
            figures[name] |= {
                "sent": update.sent.total,
                "activations": engine.memory_tracker.peaks["train"]["activations"],
            }
    print(json.dumps(figures), flush=True)
    dist.stop()


def _engine(ranks: int) -> Engine:
    settings = EngineSettings(dtype="bf16", zero_stage=3, sequence_parallel=ranks)
    source = resolve(ModelConfig(name="small", weights="random", architecture=SHAPE), seed=1)
    engine = build_policy(source, EngineChoice(settings, OptimizerConfig(lr=1e-4)))
    assert verify(engine, max_length=TOKENS)
    return engine


def _local_rows() -> list[TokenBatch]:
    """Return the rows of this rank's sequence group."""
    world = dist.world()
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    scored, documents = torch.arange(1, TOKENS), Documents((TOKENS,))
    return [TokenBatch(row[None], scored, documents) for row in ids[world.data_rank :: world.data_size]]


if __name__ == "__main__":
    main(int(sys.argv[1]))
