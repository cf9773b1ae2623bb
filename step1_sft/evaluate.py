"""Held-out loss, and answers of the base and the tuned model to held-out prompts."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from engine import Engine
from pipeline.config.schema import RunConfig
from pipeline.data.batch import TokenBatch
from pipeline.data.encode import TokenItem
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import barrier, is_rank_zero, sum_over_ranks
from pipeline.evaluation.evaluator import EVALUATION_SEED, answers_of
from pipeline.evaluation.judge import judged
from pipeline.evaluation.samples import SAMPLES, Sample, read_samples, write_samples
from pipeline.evaluation.user_function import UserFunction
from pipeline.stages.settings import sampling
from step1_sft.batches import micro_batches


def held_out_loss(engine: Engine, items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int) -> float:
    """Mean cross-entropy a token, in nats, over held-out conversations; nan where there are none."""
    batches, count = micro_batches(items, budget=budget, packing=packing, pad_id=pad_id)

    def loss(module: nn.Module, batch: TokenBatch) -> list[Tensor]:
        logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
        return [-logprobs.double().sum()]

    total = sum((part.item() for losses in engine.score(batches, loss) for part in losses), 0.0)
    return sum_over_ranks(total) / count if count else float("nan")


def answer(
    name: str,
    config: RunConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    folder: Path,
    judge: UserFunction | None = None,
) -> float | None:
    """Answer the held-out prompts and add the answers to samples.jsonl under `name`. Returns the mean gold score."""
    how = sampling(config.rollout, tokenizer, seed=EVALUATION_SEED)
    answers = answers_of(engine, tokenizer, prompts, how, keep=False)  # all of the training lies in between
    gold = judged(prompts, answers, judge)
    if is_rank_zero():
        known = {sample.prompt: sample for sample in read_samples(folder / SAMPLES)}
        rows = []
        for index, prompt in enumerate(prompts):
            before = known.get(prompt.messages, Sample(prompt.messages, {}))
            golds = before.gold if gold is None else {**before.gold, name: gold[index]}
            rows.append(Sample(prompt.messages, {**before.answers, name: answers[index]}, gold=golds))
        write_samples(folder / SAMPLES, rows)
    barrier()
    return None if not gold else sum(gold) / len(gold)
