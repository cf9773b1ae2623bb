"""TRL's SFTTrainer: fp32 weights, bf16 autocast; conversations packed into rows, or one row per conversation."""

from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.baselines.models import TRAINER_ARGUMENTS, random_model, word_tokenizer
from benchmarks.peers.baselines.step_times import StepTimes
from benchmarks.peers.child_process import read_task, report


class TokenCounter(SFTTrainer):
    """Count the tokens of each micro-batch, without padding."""

    counts: list[float]

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        mask = inputs.get("attention_mask")
        real = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        self.counts.append(float(real))
        return super().training_step(model, inputs, *rest, **more)


def main() -> None:
    """Train; report the seconds of the steps."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    packed, steps = task["layout"] == "packed", task["warmup"] + task["steps"]
    step_times = StepTimes()
    config = SFTConfig(
        output_dir=task["folder"],
        max_steps=steps,
        # A packed row holds several conversations. Without packing, small batches have the least padding.
        per_device_train_batch_size=task["rows"] if packed else task["micro_rows"],
        gradient_accumulation_steps=1 if packed else task["conversations"] // task["micro_rows"],
        packing=packed,
        max_length=task["max_length"],
        bf16=task["precision"] == "bf16",
        learning_rate=task["lr"],
        **TRAINER_ARGUMENTS,
    )
    trainer = TokenCounter(
        model=random_model(task["shape"]),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": task["sequences"]}),
        processing_class=word_tokenizer(task["shape"]),
        callbacks=[step_times],
    )
    trainer.counts = []
    trainer.train()
    per_step = len(trainer.counts) // steps
    tokens = [sum(trainer.counts[step * per_step : (step + 1) * per_step]) for step in range(steps)]
    report(step_times.seconds(task["warmup"]), tokens[task["warmup"] :])


if __name__ == "__main__":
    main()
