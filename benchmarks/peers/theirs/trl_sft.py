"""TRL's SFTTrainer: fp32 weights, bf16 by autocast; packed into rows or a row a conversation."""

from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.children import report, told
from benchmarks.peers.theirs.clock import Clock
from benchmarks.peers.theirs.made import QUIET, model, tokenizer


class Counting(SFTTrainer):
    """Counts real tokens."""

    counts: list[float]

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        mask = inputs.get("attention_mask")
        real = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        self.counts.append(float(real))
        return super().training_step(model, inputs, *rest, **more)


def main() -> None:
    """Train, and tell the steps' times."""
    work = told()
    torch.set_num_threads(work["threads"])
    packed, steps = work["layout"] == "packed", work["warmup"] + work["steps"]
    clock = Clock()
    config = SFTConfig(
        output_dir=work["folder"],
        max_steps=steps,
        # Packed, a row of the longest length holds several conversations; otherwise a few rows at a time waste least.
        per_device_train_batch_size=work["rows"] if packed else work["micro_rows"],
        gradient_accumulation_steps=1 if packed else work["conversations"] // work["micro_rows"],
        packing=packed,
        max_length=work["max_length"],
        bf16=work["precision"] == "bf16",
        learning_rate=work["lr"],
        **QUIET,
    )
    trainer = Counting(
        model=model(work["shape"]),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": work["sequences"]}),
        processing_class=tokenizer(work["shape"]),
        callbacks=[clock],
    )
    trainer.counts = []
    trainer.train()
    each = len(trainer.counts) // steps
    tokens = [sum(trainer.counts[step * each : (step + 1) * each]) for step in range(steps)]
    report(clock.seconds(work["warmup"]), tokens[work["warmup"] :])


if __name__ == "__main__":
    main()
