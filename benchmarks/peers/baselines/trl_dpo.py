"""TRL's DPOTrainer: fp32 weights, bf16 autocast; chosen and rejected rows padded to the longest row.

The reference's log-probabilities are precomputed. The optimizer has the settings of our optimizer, so that the steps
after the first one can be compared.
"""

import time
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from benchmarks.peers.baselines.models import TRAINER_ARGUMENTS, random_model, word_tokenizer
from benchmarks.peers.baselines.step_times import StepTimes
from benchmarks.peers.child_process import read_task, report
from benchmarks.peers.weights import fill

FIGURES = ("loss", "logps/chosen", "logps/rejected")


class TokenizedTrainer(DPOTrainer):
    """Use token ids without preparation, and measure the seconds of the reference."""

    reference_seconds: float

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, *arguments: Any, **more: Any) -> Any:
        start = time.perf_counter()
        logps = super()._precompute_ref_logps(*arguments, **more)
        self.reference_seconds = time.perf_counter() - start
        return logps


def main() -> None:
    """Train; report the seconds and the figures of the steps."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    step_times, module = StepTimes(), random_model(task["shape"])
    fill(module)
    config = DPOConfig(
        output_dir=task["folder"],
        max_steps=task["warmup"] + task["steps"],
        per_device_train_batch_size=task["micro_rows"],
        gradient_accumulation_steps=task["pairs_a_step"] // task["micro_rows"],
        max_length=task["max_length"],
        precompute_ref_log_probs=True,
        beta=task["beta"],
        bf16=task["precision"] == "bf16",
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        train_sampling_strategy="sequential",
        logging_steps=1,
        **TRAINER_ARGUMENTS,
    )
    prompts, chosen, rejected = zip(*task["preferences"], strict=True)
    rows = {"prompt_ids": list(prompts), "chosen_ids": list(chosen), "rejected_ids": list(rejected)}
    trainer = TokenizedTrainer(
        model=module,
        args=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=word_tokenizer(task["shape"]),
        callbacks=[step_times],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    report(
        step_times.seconds(task["warmup"]),
        [float(task["pairs_a_step"])] * task["steps"],
        figures=[[entry[name] for name in FIGURES] for entry in logged],
        reference_seconds=trainer.reference_seconds,
    )


if __name__ == "__main__":
    main()
