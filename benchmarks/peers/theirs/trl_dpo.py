"""TRL's DPOTrainer: fp32 weights, bf16 by autocast; chosen and rejected rows padded to the longest.

The reference's log-probabilities are precomputed. Its optimizer is set as ours, so that later steps can be compared.
"""

import time
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from benchmarks.peers.children import report, told
from benchmarks.peers.theirs.clock import Clock
from benchmarks.peers.theirs.made import QUIET, model, tokenizer
from benchmarks.peers.weights import fill

FIGURES = ("loss", "logps/chosen", "logps/rejected")


class Tokenized(DPOTrainer):
    """Takes token ids as they are, and tells how long the reference took."""

    reference_seconds: float

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, *arguments: Any, **more: Any) -> Any:
        began = time.perf_counter()
        known = super()._precompute_ref_logps(*arguments, **more)
        self.reference_seconds = time.perf_counter() - began
        return known


def main() -> None:
    """Train, and tell the steps' times and what their pairs came to."""
    work = told()
    torch.set_num_threads(work["threads"])
    clock, made = Clock(), model(work["shape"])
    fill(made)
    config = DPOConfig(
        output_dir=work["folder"],
        max_steps=work["warmup"] + work["steps"],
        per_device_train_batch_size=work["micro_rows"],
        gradient_accumulation_steps=work["pairs_a_step"] // work["micro_rows"],
        max_length=work["max_length"],
        precompute_ref_log_probs=True,
        beta=work["beta"],
        bf16=work["precision"] == "bf16",
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        train_sampling_strategy="sequential",
        logging_steps=1,
        **QUIET,
    )
    prompts, chosen, rejected = zip(*work["preferences"], strict=True)
    rows = {"prompt_ids": list(prompts), "chosen_ids": list(chosen), "rejected_ids": list(rejected)}
    trainer = Tokenized(
        model=made,
        args=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(work["shape"]),
        callbacks=[clock],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    report(
        clock.seconds(work["warmup"]),
        [float(work["pairs_a_step"])] * work["steps"],
        figures=[[entry[name] for name in FIGURES] for entry in logged],
        reference_seconds=trainer.reference_seconds,
    )


if __name__ == "__main__":
    main()
