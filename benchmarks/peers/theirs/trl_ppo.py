"""TRL's PPOTrainer: fp32 weights, bf16 by autocast where it trains; every answer has its full length."""

import torch
from datasets import Dataset
from trl import PPOConfig, PPOTrainer

from benchmarks.peers.children import report, told
from benchmarks.peers.theirs.clock import Clock
from benchmarks.peers.theirs.made import QUIET, model, tokenizer


def main() -> None:
    """Train, and tell the iterations' times."""
    work = told()
    torch.set_num_threads(work["threads"])
    iterations, prompts = work["warmup"] + work["steps"], work["prompts"]
    clock = Clock()
    config = PPOConfig(
        output_dir=work["folder"],
        total_episodes=iterations * len(prompts),
        per_device_train_batch_size=len(prompts),
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=len(prompts),
        num_mini_batches=1,
        num_ppo_epochs=1,
        response_length=work["new_tokens"],
        temperature=1.0,
        num_sample_generations=0,
        bf16=work["precision"] == "bf16",
        learning_rate=work["lr"],
        **QUIET,
    )
    data = Dataset.from_dict({"input_ids": prompts})
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer(work["shape"]),
        model=model(work["shape"]),
        ref_model=model(work["shape"]),
        reward_model=model(work["shape"], scores=True),
        value_model=model(work["shape"], scores=True),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[clock],
    )
    trainer.train()
    report(clock.seconds(work["warmup"]), [float(len(prompts) * work["new_tokens"])] * work["steps"])


if __name__ == "__main__":
    main()
