"""What the stages read of the data: records, ids and held-out prompts, made by the first rank for all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from pipeline.config.schema import RunConfig, StageSection
from pipeline.config.stages import POLICIES, STAGES, wanted_stages
from pipeline.data.load import KEPT_FOR_OTHERS, StageRecords, load_held_out, load_stage, made_here
from pipeline.data.records import Preference, Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import is_rank_zero, on_rank_zero
from pipeline.errors import UserError
from pipeline.imports import kept_for_good

Encoded = TypeVar("Encoded", bound=Sequence[object])


@dataclass(frozen=True)
class Examples(Generic[Encoded]):
    """Token ids of what a stage trains on and of what is held out; how many records were left out or cut, by reason."""

    train: Encoded
    held_out: Encoded
    skipped: dict[str, int]


def stage_records(config: RunConfig, stage: str) -> StageRecords:
    """The stage's records, on the first rank; the others learn what was skipped. Says so."""
    read: list[StageRecords] = []

    def load() -> dict[str, int]:
        if not made_here(config.data, stage):
            print(f"{stage}: reads its data", flush=True)
        with kept_for_good():
            read.append(_load(config, stage))
        return read[0].skipped

    skipped = on_rank_zero(load)
    records = read[0] if read else StageRecords([], [], skipped)
    if is_rank_zero() and records.skipped:
        print(f"{stage}: skipped rows: {_counted(records.skipped)}", flush=True)
        if KEPT_FOR_OTHERS in records.skipped:
            print(
                f"{stage}: trains on {len(records.train)} rows, as each prompt serves one stage only: "
                "data.stage_shares sets the shares, `stages` of a source which stages it serves",
                flush=True,
            )
    if is_rank_zero() and not made_here(config.data, stage):
        again = len(records.train) - len(set(records.train))
        if again:
            print(f"{stage}: {again} of {len(records.train)} rows repeat another, and count as often", flush=True)
    return records


def examples(
    stage: str,
    section: StageSection,
    records: StageRecords,
    encode: Callable[..., tuple[Encoded, Mapping[str, int]]],
) -> Examples[Encoded]:
    """A stage's records as `encode(records, name=what they are called)` makes ids of them. Says what was cut.

    Raises UserError where nothing is left to train on, or where the best model is to be chosen by nothing.
    """
    train, notes = on_rank_zero(partial(encode, records.train))
    log_cut(stage, notes, len(records.train), f"{stage}.max_length")
    few = records.held_out[: section.eval_examples]
    held_out, _ = on_rank_zero(partial(encode, few, name=f"held-out {STAGES[stage].examples}"))
    if section.export == "best" and not held_out:
        raise UserError(
            f"{stage}.export=best has nothing to judge by: no examples are held out (data.eval_fraction, or eval_path "
            f"of a source); {stage}.export=last does without"
        )
    return Examples(train, held_out, {**records.skipped, **notes})


def log_undecided(stage: str, pairs: Sequence[Preference]) -> None:
    """Say of how many pairs the data's own scores don't agree that the chosen answer is the better one."""
    scored = {pair.source for pair in pairs if pair.margin}
    ties = sum(not pair.margin for pair in pairs if pair.source in scored)
    turned = sum(pair.margin < 0 for pair in pairs)
    if is_rank_zero() and (ties or turned):
        print(
            f"{stage}: by the data's scores, of {len(pairs)} pairs {ties} are ties and {turned} have the better answer "
            "as rejected; all are trained on as they are labelled",
            flush=True,
        )


def check_data_to_come(config: RunConfig, stage: str) -> list[Prompt] | None:
    """The run's first stage refuses what a later one would, rather than after a day. Returns what was found to be held
    out for PPO, on the first rank; None elsewhere, and where it was not read.
    """
    first, *later = wanted_stages(config)
    to_read = [each for each in later if not made_here(config.data, each)]
    if stage != first or not to_read:
        return None
    found: dict[str, list[Prompt]] = {}

    def check() -> None:
        print(f"{stage}: reading the data of {' and '.join(to_read)} too, to refuse it now if need be", flush=True)
        found.update({each: _load(config, each).held_out for each in to_read})

    on_rank_zero(check)
    return found.get("ppo")


def evaluation_prompts(
    config: RunConfig, tokenizer: ChatTokenizer, held_out: Sequence[Prompt] | None = None
) -> list[Prompt]:
    """The held-out prompts that base, SFT and PPO (or DPO) model all answer, on every rank. `held_out` are those of
    PPO, on the first rank, where they have been read already.

    Raises UserError where none fits and PPO or DPO is to come.
    """
    return on_rank_zero(lambda: _chosen_prompts(config, tokenizer, held_out))


def _chosen_prompts(config: RunConfig, tokenizer: ChatTokenizer, held_out: Sequence[Prompt] | None) -> list[Prompt]:
    rows = config.evaluation.judge is not None or _wants_rows(config)
    if held_out is None or rows != _wants_rows(config):  # or those that were read lack the rows
        held_out = load_held_out(config.data, rows=rows)
    limit = config.rollout.max_prompt_tokens
    fitting = (p for p in held_out if len(tokenizer.encode_prompt(p.messages)) <= limit)
    chosen = [prompt for prompt, _ in zip(fitting, range(config.evaluation.prompts), strict=False)]
    if not chosen:
        told = f"none of the {len(held_out)} held-out prompts fits within rollout.max_prompt_tokens={limit}"
        judged = [stage.upper() for stage in wanted_stages(config) if stage in POLICIES]
        if judged:
            raise UserError(
                f"{told}, so that nothing would tell what {judged[0]} does: raise it, or hold out others "
                "(data.eval_fraction, eval_path of a source)"
            )
        print(f"{told}: none is answered", flush=True)
    return chosen


def log_cut(stage: str, notes: Mapping[str, int], count: int, limit: str) -> None:
    """Say how many of a stage's `count` examples were cut or dropped for their length, which `limit` (a key) bounds."""
    if is_rank_zero() and notes:
        print(f"{stage}: too long, of {count}: {_counted(notes)}; {limit} sets the limit", flush=True)


def _load(config: RunConfig, stage: str) -> StageRecords:
    return load_stage(config.data, stage, config.seed, rows=stage == "ppo" and _wants_rows(config))


def _wants_rows(config: RunConfig) -> bool:
    """A reward function is told the rows that prompts come from; nobody else needs them in training."""
    return config.ppo.reward_function is not None


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {why}" for why, count in sorted(reasons.items()))
