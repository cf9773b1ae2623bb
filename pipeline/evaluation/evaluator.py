"""The held-out prompts that base, SFT and PPO (or DPO) model all answer, and what came out: samples.jsonl."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import Engine, Sampling
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import barrier, gather_by_index, is_rank_zero
from pipeline.evaluation.samples import SAMPLES, Sample, read_samples, write_samples

EVALUATION_SEED = 20011


@dataclass(frozen=True)
class HeldOut:
    """One policy's answers to the held-out prompts. What is None nobody gave: `scores` are what PPO is trained on, gold
    is a judge's, `function` the reward function's part where that scores beside a reward model.
    """

    answers: list[str]
    scores: list[float] | None
    gold: list[float] | None
    function: list[float] | None = None

    @property
    def figures(self) -> dict[str, float]:
        """Their means."""
        given = {"eval_score": self.scores, "eval_function_score": self.function, "gold_score": self.gold}
        return {name: statistics.fmean(values) for name, values in given.items() if values is not None}


def answers_of(
    engine: Engine, tokenizer: ChatTokenizer, prompts: Sequence[Prompt], how: Sampling, *, keep: bool
) -> list[str]:
    """Answers to prompts, all on every rank, the work spread over ranks. The noise belongs to the prompt's place, so
    that every model that answers meets the same.

    `keep` holds the generator's weights and cache for the next time.
    """
    asked = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    with engine.generating(keep=keep) as rollouts:
        places = engine.flip.assign([len(ids) for ids in asked], how.max_new_tokens / 2)
        to_answer = [asked[place] for place in places]
        mine = rollouts.generate(to_answer, how, places, text=tokenizer.decode) if places else []
    return gather_by_index({place: tokenizer.decode(made.token_ids) for place, made in zip(places, mine, strict=True)})


def compared(
    prompts: Sequence[Prompt], folder: Path, own: HeldOut, judge: Callable[[list[str]], HeldOut]
) -> dict[str, HeldOut]:
    """A stage's own answers beside those of base and SFT model, which are judged again: in samples.jsonl of its folder,
    and by model.
    """
    results = {}
    for name, where in (("base", folder.parent / "sft"), ("sft", folder)):
        answers = earlier_answers(prompts, where, name)
        if answers is not None:
            results[name] = judge(answers)
    results[folder.name] = own
    write_table(prompts, results, folder)
    return results


def earlier_answers(prompts: Sequence[Prompt], folder: Path, name: str) -> list[str] | None:
    """What a model answered to these very prompts in an earlier stage; None unless all are there."""
    known = {sample.prompt: sample.answers.get(name) for sample in read_samples(folder / SAMPLES)}
    answers = [known.get(prompt.messages) for prompt in prompts]
    return [a for a in answers if a is not None] if all(a is not None for a in answers) else None


def write_table(prompts: Sequence[Prompt], results: Mapping[str, HeldOut], folder: Path) -> None:
    """samples.jsonl: each prompt with every model's answer, scores and gold score."""
    if is_rank_zero():
        write_samples(
            folder / SAMPLES,
            [
                Sample(
                    prompt.messages,
                    {name: result.answers[i] for name, result in results.items()},
                    {name: result.scores[i] for name, result in results.items() if result.scores is not None},
                    {name: result.gold[i] for name, result in results.items() if result.gold is not None},
                    {name: result.function[i] for name, result in results.items() if result.function is not None},
                )
                for i, prompt in enumerate(prompts)
            ],
        )
    barrier()
