"""Training steps of one rank with DeepSpeed and the model's own loss, in DeepSpeed's environment.

Arguments: `STAGE STEPS PRECISION`.
"""

import sys
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.zero.deepspeed_work import LEARNING_RATE, architecture, rows_of_rank, run_steps


def settings(stage: int, precision: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration: fp32 masters, AdamW, and the clipping of our engine."""
    rows = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    adam = {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    return {
        **rows,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
    }


def main(stage: int, steps: int, precision: str) -> None:
    """Train on random tokens, on one thread, without dropout."""
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    fields = architecture()
    no_dropout: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields, **no_dropout), attn_implementation="sdpa")
    engine, *_ = deepspeed.initialize(
        model=model, config=settings(stage, precision), model_parameters=model.parameters()
    )
    engine.train()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def step(number: int) -> float:
        ids = rows_of_rank(number, rank, ranks, fields["vocab_size"])
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    run_steps(step, torch.distributed.barrier, steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
