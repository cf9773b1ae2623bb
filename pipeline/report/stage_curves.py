"""Define the charts of each stage: their metrics, titles and notes, and build the stage sections of the report."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.stages import STAGES
from pipeline.report.curves import line_chart
from pipeline.report.data import StageReading
from pipeline.report.html import Markup, grid, section
from pipeline.report.reward_card import accuracy_chart, reward_card
from pipeline.report.svg import Point, Series

Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Curve:
    """One line of a chart: the key in metrics.jsonl, and how it is drawn (see `Series`)."""

    key: str
    label: str = ""
    tone: str = "plain"
    sparse: bool = False
    exact: bool = False
    minus: float = 0.0


@dataclass(frozen=True)
class Plot:
    """One chart: its title with the unit, its curves, and a note that explains good values."""

    title: str
    note: str
    curves: Sequence[Curve]
    bounds: Bounds = (None, None)
    reference: float | None = None
    only_if_moving: bool = False


def _pair(train: str, held_out: str) -> tuple[Curve, Curve]:
    return Curve(train, "training"), Curve(held_out, "held-out", "strong", sparse=True)


def _critic(key: str) -> Curve:
    return Curve(key, "critic", "second")


GRADIENT = Plot("Gradient norm", "Before clipping.", [Curve("grad_norm")], (0, None))
RATE = Plot("Learning rate", "As scheduled.", [Curve("lr", exact=True)], (0, None))

SFT_PLOTS = (
    Plot(
        "Loss, nats per token",
        "Lower is better. A held-out loss far above the training loss means overfitting.",
        _pair("loss", "eval_loss"),
    ),
    GRADIENT,
    RATE,
)

REWARD_PLOTS = (
    Plot(
        "Loss, nats per pair",
        "0.69 is the loss of a random choice.",
        _pair("loss", "eval_loss"),
        (0, None),
        0.6931,
    ),
    Plot(
        "Accuracy",
        "Share of pairs in which the chosen answer scores higher; 0.5 is a random choice.",
        _pair("accuracy", "eval_accuracy"),
        (None, 1),
        0.5,
    ),
    Plot(
        "Margin",
        "Mean score of the chosen answers minus that of the rejected answers.",
        [Curve("margin")],
        reference=0.0,
    ),
    GRADIENT,
    RATE,
)

DPO_PLOTS = (
    Plot(
        "Loss per pair",
        "The sigmoid loss begins at 0.69. A rising held-out loss with a falling training loss means overfitting.",
        _pair("loss", "eval_loss"),
        (0, None),
    ),
    Plot(
        "Accuracy",
        "Share of pairs whose chosen answer has gained more probability than the rejected one; 0.5 is a random choice. "
        "In the first step the model is unchanged, so rounding decides.",
        _pair("accuracy", "eval_accuracy"),
        (None, 1),
        0.5,
    ),
    Plot(
        "Margin",
        "Mean reward of the chosen answers minus that of the rejected answers.",
        _pair("margin", "eval_margin"),
        reference=0.0,
    ),
    Plot(
        "Rewards",
        "beta times the score that dpo.loss compares (by default the log-ratio to the reference). If both fall, chosen "
        "answers become unlikely too: raise dpo.sft_coef.",
        (
            Curve("chosen_reward", "chosen", "strong"),
            Curve("rejected_reward", "rejected"),
            Curve("eval_chosen_reward", "held-out", "strong", sparse=True),
            Curve("eval_rejected_reward", "held-out", sparse=True),
        ),
        reference=0.0,
    ),
    Plot(
        "Log-probability, nats per answer",
        "Of the answers in the data.",
        (Curve("chosen_logprob", "chosen", "strong"), Curve("rejected_logprob", "rejected")),
    ),
    Plot(
        "Drift, nats per answer",
        "Mean absolute difference of the answers' log-probabilities from the reference.",
        [Curve("drift")],
        (0, None),
    ),
    GRADIENT,
    RATE,
)

PPO_PLOTS = (
    Plot(
        "Reward score",
        "Mean over the answers of a rollout, and over held-out prompts at the first of evaluation.temperatures.",
        (Curve("score", "rollouts"), Curve("eval_score", "held-out", "strong", sparse=True)),
    ),
    Plot(
        "Reward function's share of the score",
        "Mean over the answers of a rollout, and over held-out prompts at the first of evaluation.temperatures.",
        (Curve("function_score", "rollouts"), Curve("eval_function_score", "held-out", "strong", sparse=True)),
    ),
    Plot(
        "Total reward",
        "Mean over answers of the score, its penalties, and the KL if ppo.kl_in=reward.",
        [Curve("reward")],
    ),
    Plot("Spread of the score", "Standard deviation within a rollout.", [Curve("score_std")], (0, None)),
    Plot(
        "KL to the reference, nats per sequence",
        "Distance of the policy from the model that PPO started from.",
        [Curve("kl")],
    ),
    Plot(
        "Prompts without a signal",
        "Share of prompts whose answers all have the same score: they give no gradient.",
        [Curve("alike_prompts")],
        (0, 1),
    ),
    Plot(
        "Entropy, nats per token", "Near zero, the policy always gives the same answer.", [Curve("entropy")], (0, None)
    ),
    Plot("Answer length, tokens", "With the end token.", [Curve("response_length")], (0, None)),
    Plot(
        "Reward and length",
        "Rank correlation over the answers of a rollout. Near 1, the reward is little more than the length.",
        [Curve("length_correlation")],
        (-1, 1),
        0.0,
    ),
    Plot(
        "Reward and judge",
        "Rank correlation over held-out answers, at the first and at the other temperatures. Below 0, the reward "
        "contradicts the judge.",
        (
            Curve("judge_correlation", "first", sparse=True),
            Curve("judge_correlation_at_0", "greedy", "strong", sparse=True),
        ),
        (-1, 1),
        0.0,
    ),
    Plot("Finished answers", "Share of answers with an end token.", [Curve("eos_rate")], (0, 1)),
    Plot(
        "First ratio, distance from 1",
        "In the first minibatch of a rollout the policy is unchanged, so the distance must be rounding error.",
        (
            Curve("first_ratio", "mean", minus=1.0),
            Curve("first_ratio_max_deviation", "largest", "strong"),
        ),
        reference=0.0,
    ),
    Plot(
        "Clipped tokens",
        "Share of tokens that are clipped. Above about 0.3 for the policy, steps are too large.",
        (Curve("clip_fraction", "policy"), _critic("value_clip_fraction")),
        (0, None),
    ),
    Plot("KL of an update, nats per token", "Between the policy before and after the update.", [Curve("approx_kl")]),
    Plot("Policy loss", "Clipped surrogate. Its level has no meaning.", [Curve("policy_loss")]),
    Plot("Value loss", "Half the squared error of the critic, clipped.", [Curve("value_loss")], (0, None)),
    Plot(
        "Explained variance",
        "Share of the variance of the returns that the critic predicts; 0 is as good as predicting their mean.",
        [Curve("explained_variance")],
        (None, 1),
        0.0,
    ),
    Plot(
        "KL coefficient",
        "Weight of the KL penalty, adapted to ppo.kl_target.",
        [Curve("kl_coef")],
        (0, None),
        only_if_moving=True,
    ),
    Plot(
        "Gap between generator and trainer",
        "Mean difference of a token's probability. Above 0.01, generator and trainer are different models.",
        [Curve("generator_gap")],
        (0, None),
    ),
    Plot("Gradient norm", "Before clipping.", (Curve("grad_norm", "policy"), _critic("critic_grad_norm")), (0, None)),
    Plot(
        "Learning rate",
        "As scheduled.",
        (Curve("lr", "policy", exact=True), Curve("critic_lr", "critic", "second", exact=True)),
        (0, None),
    ),
)


def _plot(stage: StageReading, plot: Plot) -> Markup | None:
    series = [
        Series(curve.label, _points(stage, curve), curve.tone, curve.sparse, curve.exact) for curve in plot.curves
    ]
    if plot.only_if_moving and len({value for one in series for _, value in one.points}) < 2:
        return None
    return line_chart(
        plot.title,
        [one for one in series if one.points],
        x_name=STAGES[stage.name].step,
        note=plot.note,
        bounds=plot.bounds,
        reference=plot.reference,
    )


def _points(stage: StageReading, curve: Curve) -> list[Point]:
    return [(step, value - curve.minus) for step, value in stage.series(curve.key)]


def stage_section(stage: StageReading, title: str, lead: str, wanted: Sequence[Plot]) -> Markup | None:
    """Build the report section of a stage. Return None if the stage has not started."""
    if not stage.started:
        return None
    notes = []
    if not stage.finished:
        notes.append(f"Unfinished: the last logged step is {stage.last_step}.")
    exported, steps = stage.number("exported_step"), stage.number("steps")
    if exported is not None and exported != steps:
        notes.append(f"The exported model is that of step {exported:.0f}, the best of the evaluations.")
        if exported:
            notes.append("Its held-out figures look better than they are, because they selected the model.")
    text = " ".join([lead, *notes])
    figures = grid([*(_plot(stage, plot) for plot in wanted), accuracy_chart(stage)])
    return section(stage.name, title, text, figures, reward_card(stage.card))
