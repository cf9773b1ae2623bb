"""TRL's PPOTrainer: fp32 weights, bf16 autocast in training; every answer has its full length."""

import torch
from datasets import Dataset
from trl import PPOConfig, PPOTrainer

from benchmarks.peers.baselines.models import TRAINER_ARGUMENTS, random_model, word_tokenizer
from benchmarks.peers.baselines.step_times import StepTimes
from benchmarks.peers.child_process import read_task, report


def main() -> None:
    """Train; report the seconds of the iterations."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    iterations, prompts = task["warmup"] + task["steps"], task["prompts"]
    step_times = StepTimes()
    config = PPOConfig(
        output_dir=task["folder"],
        total_episodes=iterations * len(prompts),
        per_device_train_batch_size=len(prompts),
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=len(prompts),
        num_mini_batches=1,
        num_ppo_epochs=1,
        response_length=task["new_tokens"],
        temperature=1.0,
        num_sample_generations=0,
        bf16=task["precision"] == "bf16",
        learning_rate=task["lr"],
        **TRAINER_ARGUMENTS,
    )
    data = Dataset.from_dict({"input_ids": prompts})
    trainer = PPOTrainer(
        args=config,
        processing_class=word_tokenizer(task["shape"]),
        model=random_model(task["shape"]),
        ref_model=random_model(task["shape"]),
        reward_model=random_model(task["shape"], scores=True),
        value_model=random_model(task["shape"], scores=True),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[step_times],
    )
    trainer.train()
    report(step_times.seconds(task["warmup"]), [float(len(prompts) * task["new_tokens"])] * task["steps"])


if __name__ == "__main__":
    main()
