"""TRL's RewardTrainer: fp32 weights, bf16 autocast; chosen and rejected rows padded to the longest row."""

import torch
from datasets import Dataset
from trl import RewardConfig, RewardTrainer

from benchmarks.peers.baselines.models import TRAINER_ARGUMENTS, random_model, word_tokenizer
from benchmarks.peers.baselines.step_times import StepTimes
from benchmarks.peers.child_process import read_task, report


def main() -> None:
    """Train; report the seconds of the steps."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    steps, step_times = task["warmup"] + task["steps"], StepTimes()
    config = RewardConfig(
        output_dir=task["folder"],
        max_steps=steps,
        per_device_train_batch_size=task["micro_rows"],
        gradient_accumulation_steps=task["pairs_a_step"] // task["micro_rows"],
        max_length=task["max_length"],
        bf16=task["precision"] == "bf16",
        learning_rate=task["lr"],
        **TRAINER_ARGUMENTS,
    )
    chosen, rejected = zip(*task["pairs"], strict=True)
    trainer = RewardTrainer(
        model=random_model(task["shape"], scores=True),
        args=config,
        train_dataset=Dataset.from_dict({"chosen_ids": list(chosen), "rejected_ids": list(rejected)}),
        processing_class=word_tokenizer(task["shape"]),
        callbacks=[step_times],
    )
    trainer.train()
    report(step_times.seconds(task["warmup"]), [float(task["pairs_a_step"])] * task["steps"])


if __name__ == "__main__":
    main()
