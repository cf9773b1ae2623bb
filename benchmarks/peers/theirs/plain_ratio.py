"""How far first ratios are from 1 where PPO is written plainly: a bf16 model of transformers, its logits in bf16.

Prompts are padded on the left, as `generate` wants them. Old log-probabilities are the scores that `generate` hands
out, new ones a training forward's over minibatches; or the old ones are forwarded too, over all answers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.children import report, told

PAD = 1


def main() -> None:
    """Draw answers, take the first minibatches' ratios."""
    work = told()
    torch.set_num_threads(work["threads"])
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**work["shape"])
    model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # all answers have their full length
    prompts, parts = work["prompts"], work["parts"]
    shown = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (shown - len(prompt)) + prompt for prompt in prompts])
    seen = ids != PAD
    with torch.no_grad():
        drawn = model.generate(
            ids,
            attention_mask=seen.long(),
            max_new_tokens=work["new_tokens"],
            do_sample=True,
            top_k=0,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = drawn.sequences
        generated = _chosen(torch.stack(drawn.logits, 1), ids[:, shown:])
        seen = torch.cat([seen, seen.new_ones(len(ids), work["new_tokens"])], 1)
        scored = _forward(model, ids, seen, shown)
    model.train()
    order = torch.cat([torch.arange(first, len(ids), parts) for first in range(parts)])
    places = order.chunk(parts)
    new = torch.cat([_forward(model, ids[p], seen[p], shown).detach() for p in places])[order.argsort()]
    report(
        [1.0],
        [float(new.numel())],
        first=(new - scored).flatten().tolist(),
        generator=(new - generated).flatten().tolist(),
    )


def _forward(model: Any, ids: Tensor, seen: Tensor, shown: int) -> Tensor:
    """(B, R) of the answers."""
    logits = model(ids, attention_mask=seen.long(), use_cache=False).logits[:, shown - 1 : -1]
    return _chosen(logits, ids[:, shown:])


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, R) fp32 from bf16 logits (B, R, V)."""
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]


if __name__ == "__main__":
    main()
