"""The rules of the training guard: from a history of metrics to findings, each with its sentence.

All functions are pure: numbers in, findings out. A rule about rollouts compares the mean of the last `WINDOW` rollouts
with the first rollout, whose answers are those of the initial policy (the SFT model). A rule about evaluations compares
grades of the same held-out prompts. Its intervals have the level `CONFIDENCE`, because a run makes many comparisons.

Each rule names its source. docs/engineering/measurements.md compares the thresholds with the values of normal runs.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.evaluation.evaluator import Evaluation, Evaluations
from pipeline.evaluation.intervals import (
    Difference,
    best_against_last,
    correlation_interval,
    paired_difference,
    rank_correlation,
)

WINDOW = 3
FEWEST_ANSWERS = 64  # of a window; with fewer answers, noise is too large
FEWEST_PROMPTS = 32  # of an evaluation
CONFIDENCE = 0.998
Z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # half of an interval is Z standard errors

CLIP_FRACTION = 0.35
UPDATE_KL = 0.1
KL_PER_TOKEN = 1.0
KL_RISE, KL_RISE_PER_TOKEN = 3.0, 0.3
ENTROPY_FALL, ENTROPY_RISE = 0.05, 2.0
LENGTH_GROWTH, LENGTH_CORRELATION = 1.25, 0.9
FEW_FINISHED = 0.5
EXPLAINED_VARIANCE, CRITIC_ROLLOUTS = -1.0, 10
LOST_GAIN = 0.5  # of the gain of the best step over step 0
LOST_TWICE = 1 / 3  # of this gain, in two evaluations in a row
LOST_AT_THE_END = 0.1  # of this gain, at the last step

Row = Mapping[str, float]
"""The metrics of one rollout by their names in metrics.jsonl, and `answers`, the number of its answers."""


@dataclass(frozen=True)
class Finding:
    """A sign that training has gone wrong.

    sign: the name of the watched quantity
    sentence: the observation with its numbers
    lr_helps: whether a smaller learning rate can help
    """

    sign: str
    sentence: str
    lr_helps: bool = True


def check_rollouts(rows: Sequence[Row]) -> list[Finding]:
    """Return the findings about the last rollouts. `rows` are the first rollout and at least `WINDOW` last ones."""
    if sum(row["answers"] for row in rows[-WINDOW:]) < FEWEST_ANSWERS:
        return []
    return [finding for rule in ROLLOUT_RULES if (finding := rule(rows)) is not None]


def check_evaluation(evaluations: Mapping[int, Evaluations], best: int | None) -> list[Finding]:
    """Return the findings about the newest evaluation, at most one of each sign.

    It is compared with those of step 0 and of the step `best`.
    evaluations: those of all steps, the newest last
    """
    *earlier, newest = evaluations
    found: dict[str, Finding] = {}
    for temperature, now in evaluations[newest].items():
        before = {step: evaluations[step][temperature] for step in earlier if temperature in evaluations[step]}
        initial, previous = before.get(0), before.get(max(earlier, default=0))
        compared = [(step, grades) for step, grades in before.items() if step in (0, best)]
        falls = (fall(grades, now, step, temperature, initial, previous) for step, grades in compared)
        for finding in filter(None, (against_judge(now, temperature, initial), *falls)):
            found.setdefault(finding.sign, finding)
    return [*found.values()]


def judge_correlation(graded: Evaluation) -> float | None:
    """Return Spearman's rank correlation of reward and gold score over the answers; None if it is undefined."""
    return None if graded.scores is None or graded.gold is None else rank_correlation(graded.scores, graded.gold)


def against_judge(now: Evaluation, temperature: float, initial: Evaluation | None = None) -> Finding | None:
    """Find a reward that ranks answers against the judge: the correlation is below 0 beyond its noise.

    A gold score that has clearly risen above that of the evaluation `initial` of step 0 excludes this finding. The
    answers of a trained policy differ little in quality, so the reward's preferences between prompts decide the ranks.
    """
    correlation, count = judge_correlation(now), len(now.gold or ())
    if correlation is None or count < FEWEST_PROMPTS:
        return None
    gain = _change(initial.gold, now.gold) if initial is not None else None
    if gain is not None and gain[1] > 0:
        return None
    if correlation_interval(correlation, count, confidence=CONFIDENCE)[1] >= 0:
        return None
    return Finding(
        "judge",
        f"the reward ranks held-out answers against the judge: rank correlation {correlation:.2f} over {count} answers "
        f"at temperature {temperature:g}. Check the reward model's labels and accuracy, or the reward function",
        lr_helps=False,
    )


def fall(
    before: Evaluation,
    now: Evaluation,
    step: int,
    temperature: float,
    initial: Evaluation | None = None,
    previous: Evaluation | None = None,
) -> Finding | None:
    """Find a fall of the gold score (of the reward if there is no judge) below an earlier step, paired by prompt.

    A fall below a later step than the first counts if it loses more than `LOST_GAIN` of that step's gain over the
    evaluation `initial` of step 0. A loss of `LOST_TWICE` of the gain is enough if the evaluation `previous` has such a
    clear loss too. The best of several noisy evaluations looks better than it is.

    A reward that rises while the gold score falls is over-optimized (Gao, Schulman & Hilton, 2022, arXiv:2210.10760).
    """
    reward = _change(before.scores, now.scores)
    gold = _change(before.gold, now.gold)
    decides, name = (gold, "gold score") if gold is not None else (reward, "held-out reward")
    if decides is None or decides[2] >= 0:
        return None
    if initial is not None and step:
        kind = "scores" if gold is None else "gold"
        gain = _change(getattr(initial, kind), getattr(before, kind))
        earlier = None if previous is None else _change(getattr(before, kind), getattr(previous, kind))
        share = LOST_TWICE if _loses(earlier, gain, LOST_TWICE) else LOST_GAIN
        if not _loses(decides, gain, share):
            return None
    text = f"the {name} at temperature {temperature:g} {_below(step, decides[0], decides[2], f'{CONFIDENCE:.1%}')}"
    return _fallen(text, reward, judged=gold is not None)


def fall_at_the_end(
    history: Sequence[tuple[int, Sequence[float]]], reward: Difference | None, *, judged: bool
) -> Finding | None:
    """Find a last step that has lost more than `LOST_AT_THE_END` of the best step's gain over step 0.

    A run makes this comparison once, with an interval that the choice of the best step does not bias
    (`pipeline.evaluation.intervals.best_against_last`), so that 95% confidence is enough. To export the best step then
    costs no training, so that small losses count, and a rollback has nothing to gain.

    history: (step, one grade per prompt: the mean over the temperatures) of all evaluations, in the order of the steps
    reward: the change of the reward from the best to the last step; None if it is unknown
    judged: whether the grades are gold scores; otherwise they are rewards
    """
    found = best_against_last(history, fewest=FEWEST_PROMPTS)
    if found is None or found.high >= 0:
        return None
    first_step, first = history[0]
    if first_step == 0 and -found.mean <= LOST_AT_THE_END * (found.best_mean - statistics.fmean(first)):
        return None
    name = "gold score" if judged else "held-out reward"
    below = _below(found.best, found.mean, found.high, "95%")
    text = f"in the mean over the temperatures, the {name} of the last step {below}"
    return replace(_fallen(text, reward, judged=judged), lr_helps=False)


def _below(step: int, mean: float, high: float, confidence: str) -> str:
    """Return how far grades are below those of a step, by the mean and the upper end of the difference's interval."""
    model = f"step {step}" if step else "the SFT model"
    return f"is below that of {model} by {-mean:.2f} (at least {-high:.2f} with {confidence} confidence)"


def _fallen(text: str, reward: Difference | None, *, judged: bool) -> Finding:
    """Return the finding about grades that fell. A reward that meanwhile rose beyond its noise was over-optimized."""
    if judged and reward is not None and reward[1] > 0:
        reason = f"while the mean reward rose by {reward[0]:.2f}: PPO exploits errors of the reward"
        return Finding("gaming", f"{text}, {reason}. Raise ppo.kl_coef, or improve the reward")
    return Finding("gold" if judged else "reward", f"{text}. Lower ppo.lr, or raise ppo.kl_coef")


def _loses(change: Difference | None, gain: Difference | None, share: float) -> bool:
    """Return whether a change is below 0 with its interval, and loses more than `share` of a gain (if it is known)."""
    return change is not None and change[2] < 0 and (gain is None or -change[0] > share * gain[0])


def _change(before: Sequence[float] | None, now: Sequence[float] | None) -> Difference | None:
    """Return the mean difference with its interval; None if a grade is missing or there are too few prompts."""
    if before is None or now is None or len(before) != len(now) or len(now) < FEWEST_PROMPTS:
        return None
    return paired_difference(before, now, confidence=CONFIDENCE)


def large_updates(rows: Sequence[Row]) -> Finding | None:
    """Find updates that are too large, by the share of clipped tokens.

    The clipped objective assumes a policy near the one that sampled the answers (Schulman et al., 2017,
    arXiv:1707.06347). Huang et al., 2022, "The 37 implementation details of PPO", list this share as the metric for it.
    """
    clipped = _mean(rows, "clip_fraction")
    if clipped is None or clipped <= CLIP_FRACTION:
        return None
    return Finding(
        "clip fraction",
        f"updates are too large: {clipped:.0%} of the tokens were clipped in the last {WINDOW} rollouts (normal is "
        f"below {CLIP_FRACTION:.0%}). Lower ppo.lr",
    )


def update_kl(rows: Sequence[Row]) -> Finding | None:
    """Find updates that are too large, by the KL per token between the policy before and after the update.

    OpenAI's Spinning Up (2018) ends an update early at 0.015 nats. The limit here is about seven times as large. The
    rule uses the median of the rollouts: one token whose probability rises several thousandfold can dominate the mean
    in a normal run, because the estimate contains the ratio of the probabilities.
    """
    kl = _mean(rows, "approx_kl", statistics.median)
    if kl is None or kl <= UPDATE_KL:
        return None
    return Finding(
        "update KL",
        f"updates are too large: one update moves the policy by {kl:.2f} nats per token (normal is below "
        f"{UPDATE_KL:g}). Lower ppo.lr",
    )


def far_from_reference(rows: Sequence[Row]) -> Finding | None:
    """Find a KL to the reference of more than `KL_PER_TOKEN` nats per token.

    At one nat per token, an answer of 30 tokens is 10^13 times less likely under the SFT model. Over-optimization is a
    function of this distance (Gao et al., 2022, arXiv:2210.10760).
    """
    kl, length = _mean(rows, "kl"), _mean(rows, "response_length")
    if kl is None or not length or kl / length <= KL_PER_TOKEN:
        return None
    return Finding(
        "KL",
        f"the policy is far from the SFT model: KL {kl:.1f} nats per answer, {kl / length:.2f} per token (limit "
        f"{KL_PER_TOKEN:g}). Raise ppo.kl_coef, or set fewer ppo.steps",
    )


def fast_drift(rows: Sequence[Row]) -> Finding | None:
    """Find a KL to the reference that grew `KL_RISE`-fold within `WINDOW` rollouts, by `KL_RISE_PER_TOKEN` a token."""
    if len(rows) <= WINDOW or "kl" not in rows[-1] or "kl" not in rows[-1 - WINDOW]:
        return None
    before, now = rows[-1 - WINDOW]["kl"], rows[-1]["kl"]
    rise = (now - before) / max(1.0, rows[-1]["response_length"])
    if now <= KL_RISE * max(before, 0.0) or rise <= KL_RISE_PER_TOKEN:
        return None
    return Finding(
        "KL rate",
        f"the KL to the SFT model rose from {before:.1f} to {now:.1f} nats per answer within {WINDOW} rollouts. Lower "
        "ppo.lr",
    )


def entropy(rows: Sequence[Row]) -> Finding | None:
    """Find a policy that collapsed to one answer, or to noise, by its entropy against that of the first rollout.

    Without entropy there is no exploration and no further gain (Cui et al., 2025, arXiv:2505.22617). A fall counts
    unless the rewards of a function, which rows have as `score`, rose clearly: then the policy found right answers.
    """
    now, first = _mean(rows, "entropy"), rows[0].get("entropy")
    if now is None or not first:
        return None
    if now < ENTROPY_FALL * first:
        if _score_rose(rows):
            return None
        moved, meaning = "fell", "a prompt gets almost the same answer every time"
        advice = "Lower ppo.lr, or raise ppo.kl_coef or ppo.entropy_coef"
    elif now > ENTROPY_RISE * first + 0.5:
        moved, meaning, advice = "rose", "answers become random", "Lower ppo.lr"
    else:
        return None
    figures = f"from {first:.2f} to {now:.3f} nats per token"
    return Finding("entropy", f"the entropy {moved} {figures}: {meaning}. {advice}")


def _score_rose(rows: Sequence[Row]) -> bool:
    """Return whether the mean score of the last rollouts is above that of the first one by `CONFIDENCE`."""
    score, deviation = _mean(rows, "score"), _mean(rows, "score_std")
    if score is None or deviation is None or not {"score", "score_std"} <= rows[0].keys():
        return False
    answers = sum(row["answers"] for row in rows[-WINDOW:])
    error = math.hypot(rows[0]["score_std"] / math.sqrt(rows[0]["answers"]), deviation / math.sqrt(answers))
    return score - rows[0]["score"] > Z * error


def length(rows: Sequence[Row]) -> Finding | None:
    """Find answers that grow because the reward is little more than their length.

    The length explains most of the gain of many reward models (Singhal et al., 2023, arXiv:2310.03716).
    """
    now, first = _mean(rows, "response_length"), rows[0]["response_length"]
    correlation = _mean(rows, "length_correlation")
    if now is None or correlation is None or now <= LENGTH_GROWTH * first or correlation <= LENGTH_CORRELATION:
        return None
    return Finding(
        "length",
        f"the reward follows the length of the answers: their rank correlation is {correlation:.2f}, and answers grew "
        f"from {first:.0f} to {now:.0f} tokens. Set ppo.length_penalty, or correct the reward",
        lr_helps=False,
    )


def finished(rows: Sequence[Row]) -> Finding | None:
    """Find that fewer than half of the answers end within rollout.max_new_tokens.

    The reward model was trained on complete answers (Huang et al., 2024, arXiv:2403.17031, penalize cut ones).
    """
    now, first = _mean(rows, "eos_rate"), rows[0]["eos_rate"]
    if now is None or now >= FEW_FINISHED:
        return None
    return Finding(
        "finished answers",
        f"only {now:.0%} of the answers end within rollout.max_new_tokens ({first:.0%} in the first rollout), so the "
        "reward scores incomplete answers. Raise rollout.max_new_tokens",
        lr_helps=first >= FEW_FINISHED,
    )


def critic(rows: Sequence[Row]) -> Finding | None:
    """Find a critic that is far worse than a constant: explained variance below -1 after the first rollouts.

    The advantages then contain more error of the critic than signal (Schulman et al., 2016, arXiv:1506.02438). The rule
    uses the median of the rollouts: in a rollout whose answers have nearly equal scores, a small error is thousands of
    times the variance of the returns.
    """
    explained = _mean(rows, "explained_variance", statistics.median)
    if explained is None or rows[-1]["step"] < CRITIC_ROLLOUTS or explained >= EXPLAINED_VARIANCE:
        return None
    return Finding(
        "explained variance",
        f"the critic is worse than a constant: explained variance {explained:.2f} over the last {WINDOW} rollouts. "
        "Lower ppo.critic_lr, or set ppo.critic_warmup",
    )


Rule = Callable[[Sequence[Row]], Finding | None]
ROLLOUT_RULES: Sequence[Rule] = [
    large_updates, update_kl, far_from_reference, fast_drift, entropy, length, finished, critic
]  # fmt: skip


def _mean(
    rows: Sequence[Row], name: str, average: Callable[[Sequence[float]], float] = statistics.fmean
) -> float | None:
    """Return the average of a metric over the last `WINDOW` rollouts; None if one of them lacks it."""
    values = [row[name] for row in rows[-WINDOW:] if name in row and math.isfinite(row[name])]
    return average(values) if len(values) == WINDOW else None
