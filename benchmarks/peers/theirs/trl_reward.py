"""TRL's RewardTrainer: fp32 weights, bf16 by autocast; chosen and rejected rows padded to the longest."""

import torch
from datasets import Dataset
from trl import RewardConfig, RewardTrainer

from benchmarks.peers.children import report, told
from benchmarks.peers.theirs.clock import Clock
from benchmarks.peers.theirs.made import QUIET, model, tokenizer


def main() -> None:
    """Train, and tell the steps' times."""
    work = told()
    torch.set_num_threads(work["threads"])
    steps, clock = work["warmup"] + work["steps"], Clock()
    config = RewardConfig(
        output_dir=work["folder"],
        max_steps=steps,
        per_device_train_batch_size=work["micro_rows"],
        gradient_accumulation_steps=work["pairs_a_step"] // work["micro_rows"],
        max_length=work["max_length"],
        bf16=work["precision"] == "bf16",
        learning_rate=work["lr"],
        **QUIET,
    )
    chosen, rejected = zip(*work["pairs"], strict=True)
    trainer = RewardTrainer(
        model=model(work["shape"], scores=True),
        args=config,
        train_dataset=Dataset.from_dict({"chosen_ids": list(chosen), "rejected_ids": list(rejected)}),
        processing_class=tokenizer(work["shape"]),
        callbacks=[clock],
    )
    trainer.train()
    report(clock.seconds(work["warmup"]), [float(work["pairs_a_step"])] * work["steps"])


if __name__ == "__main__":
    main()
