"""How far the ratios of our first minibatches are from 1 in bf16: the stage's generator, scoring and training forwards.

Old log-probabilities are scored over all answers, new ones over minibatches, as the PPO stage does. The generator's
own log-probabilities, which the stage takes for importance weights alone, are compared likewise.
"""

import torch
from torch import Tensor

from benchmarks.peers.children import report, told
from benchmarks.peers.ours.engines import begin, choice, source
from engine import Sampling
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step3_ppo.microbatch import collate, policy_logprobs


def main() -> None:
    """Draw answers, score them, take the first minibatches' ratios."""
    work = told()
    begin(work)
    prompts, new_tokens, parts = work["prompts"], work["new_tokens"], work["parts"]
    engine = build_policy(source(work), choice(work), generates=True)
    assert verify(engine, max_length=work["max_length"]).packing
    how = Sampling(max_new_tokens=new_tokens, end_ids=(), pad_id=1, seed=1)
    with engine.generating() as rollouts:
        answers = rollouts.generate(prompts, how, sample_seeds=range(len(prompts)), batch_size=len(prompts))
    responses = [answer.token_ids for answer in answers]

    def score(places: list[int]) -> dict[int, Tensor]:
        batch = collate(prompts, responses, places, 1, packing=True).to(engine.device)
        flat = policy_logprobs(engine.module, batch, 1.0)[0].detach()
        return dict(zip(places, flat.split(batch.response_lengths), strict=True))

    every = list(range(len(prompts)))
    with engine.scoring():
        old = score(every)
    engine.module.train()
    new = {place: part for first in range(parts) for place, part in score(every[first::parts]).items()}
    trained, scored = (torch.cat([table[place] for place in every]) for table in (new, old))
    drawn = torch.tensor([value for answer in answers for value in answer.logprobs])
    report([1.0], [float(len(drawn))], first=(trained - scored).tolist(), generator=(trained - drawn).tolist())


if __name__ == "__main__":
    main()
