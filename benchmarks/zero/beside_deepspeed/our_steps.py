"""One rank's training steps on our engine, with the loss of the SFT stage: `STAGE STEPS`."""

import sys

import torch

from benchmarks.zero.beside_deepspeed.steps import LEARNING_RATE, architecture, rows_of_rank, run_steps
from engine import OptimizerConfig
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.batch import TokenBatch, true_indices
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.source import resolve
from step1_sft.train import loss_of


def main(stage: int, steps: int) -> None:
    """Train on random tokens, one thread."""
    torch.set_num_threads(1)
    world, fields = dist.start("steps", device="cpu"), architecture()
    optimizer = OptimizerConfig(lr=LEARNING_RATE, schedule="constant", betas=(0.9, 0.999), decay="all")
    choice = EngineChoice(EngineSettings(zero_stage=stage, dtype="bf16"), optimizer)  # type: ignore[arg-type]
    model = ModelConfig(name="opt-125m", weights="random", architecture=fields)
    engine = build_policy(resolve(model, seed=1), choice)

    def step(number: int) -> float:
        ids = rows_of_rank(number, world.rank, world.size, fields["vocab_size"])
        counts = torch.ones_like(ids, dtype=torch.bool)
        counts[:, 0] = False
        batch = TokenBatch(ids, true_indices(counts))
        return engine.update([batch], loss_of, int(counts.sum()) * world.size).loss

    run_steps(step, dist.barrier, steps)
    dist.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
