"""First ratios of plain PPO with a bf16 model of transformers, whose logits are bf16.

Prompts are padded on the left, as `generate` requires. New log-probabilities come from a training forward over
minibatches. Old ones come from the scores that `generate` returns, and from one forward over all answers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.child_process import read_task, report

PAD = 1


def main() -> None:
    """Generate answers; report the log-ratios of the first minibatches."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**task["shape"])
    model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # every answer has its full length
    prompts, count = task["prompts"], task["minibatches"]
    prompt_length = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (prompt_length - len(prompt)) + prompt for prompt in prompts])
    mask = ids != PAD
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=mask.long(),
            max_new_tokens=task["new_tokens"],
            do_sample=True,
            top_k=0,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = output.sequences
        generated = _token_logprobs(torch.stack(output.logits, 1), ids[:, prompt_length:])
        mask = torch.cat([mask, mask.new_ones(len(ids), task["new_tokens"])], 1)
        scored = _forward(model, ids, mask, prompt_length)
    model.train()
    order = torch.cat([torch.arange(first, len(ids), count) for first in range(count)])
    minibatches = order.chunk(count)
    new = torch.cat([_forward(model, ids[rows], mask[rows], prompt_length).detach() for rows in minibatches])[
        order.argsort()
    ]
    report(
        [1.0],
        [float(new.numel())],
        forward=(new - scored).flatten().tolist(),
        generator=(new - generated).flatten().tolist(),
    )


def _forward(model: Any, ids: Tensor, mask: Tensor, prompt_length: int) -> Tensor:
    """Return the log-probabilities of the answers, (B, R)."""
    logits = model(ids, attention_mask=mask.long(), use_cache=False).logits[:, prompt_length - 1 : -1]
    return _token_logprobs(logits, ids[:, prompt_length:])


def _token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return fp32 log-probabilities (B, R) from bf16 logits (B, R, V)."""
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]


if __name__ == "__main__":
    main()
