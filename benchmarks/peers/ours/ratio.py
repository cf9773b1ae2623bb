"""How far the first ratios of a rollout are from 1 in bf16: by our forwards, or from bf16 logits of padded rows.

Old log-probabilities are taken over all answers, new ones over minibatches, as PPO does: the shapes differ, and what
rounding does with them.
"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.peers.children import report, told
from benchmarks.peers.ours.engines import begin, choice, source
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step3_ppo.rollout import Rows, policy_logprobs, rows

PARTS = 4


def main() -> None:
    """The standard deviation of ratio - 1 over all response tokens."""
    work = told()
    begin(work)
    prompts, responses = work["prompts"], work["responses"]
    ours = work["layout"] == "ours"
    engine = build_policy(source(work), choice(work)) if ours else None
    if engine is not None:
        assert verify(engine, max_length=work["max_length"]).packing
    torch.manual_seed(0)
    model = None if ours else AutoModelForCausalLM.from_config(source(work).config, dtype=torch.bfloat16).eval()

    def score(places: list[int]) -> dict[int, Tensor]:
        batch = rows(prompts, responses, places, 1, packing=ours)
        with torch.no_grad():
            flat = policy_logprobs(engine.module, batch, 1.0)[0] if engine is not None else plain(model, batch)
        return dict(zip(places, flat.split(batch.counts), strict=True))

    every = list(range(len(prompts)))
    old = score(every)
    new = {place: part for first in range(PARTS) for place, part in score(every[first::PARTS]).items()}
    ratios = torch.cat([(new[place] - old[place]).exp() for place in every])
    deviation = (ratios - 1.0).square().mean().sqrt().item()
    report([1.0], [1.0], deviation=deviation, largest=(ratios - 1.0).abs().max().item())


def plain(model: torch.nn.Module | None, batch: Rows) -> Tensor:
    """Log-softmax, in fp32, of the model's bf16 logits."""
    assert model is not None
    keep = batch.score_mask[:, 1:]
    logits = model(batch.input_ids).logits[:, :-1][keep].float()
    return torch.log_softmax(logits, -1).gather(-1, batch.input_ids[:, 1:][keep][:, None])[:, 0]


if __name__ == "__main__":
    main()
