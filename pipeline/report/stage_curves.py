"""Define the charts of each stage: their metrics, titles and notes, and build the stage sections of the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config.stages import STAGES
from pipeline.report.curves import line_chart
from pipeline.report.data import StageReading
from pipeline.report.html import Markup, grid, section
from pipeline.report.reward_card import accuracy_chart, reward_card
from pipeline.report.svg import Series

Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Plot:
    """One chart: its title with the unit, a note that explains good values, and its curves by key in metrics.jsonl."""

    title: str
    note: str
    curves: Mapping[str, Series]
    bounds: Bounds = (None, None)
    reference: float | None = None

    def draw(self, stage: StageReading) -> Markup | None:
        """Draw the chart of a stage. Return None without values."""
        curves = [replace(curve, points=points) for key, curve in self.curves.items() if (points := stage.series(key))]
        return line_chart(
            self.title,
            curves,
            x_name=STAGES[stage.name].step,
            note=self.note,
            bounds=self.bounds,
            reference=self.reference,
        )


def one(key: str, *, exact: bool = False) -> Mapping[str, Series]:
    """Return a single curve."""
    return {key: Series(exact=exact)}


TRAINING, HELD_OUT = Series("training"), Series("held-out", tone="strong", sparse=True)
CRITIC = Series("critic", tone="second")
GRADIENT = Plot("Gradient norm", "Before clipping.", one("grad_norm"), (0, None))
RATE = Plot("Learning rate", "As scheduled.", one("lr", exact=True), (0, None))

SFT_PLOTS = (
    Plot(
        "Loss, nats per token",
        "Lower is better. A held-out loss far above the training loss means overfitting.",
        {"loss": TRAINING, "eval_loss": HELD_OUT},
    ),
    GRADIENT,
    RATE,
)

REWARD_PLOTS = (
    Plot(
        "Loss, nats per pair",
        "0.69 is the loss of a random choice.",
        one("loss"),
        (0, None),
        0.6931,
    ),
    Plot(
        "Accuracy",
        "Share of pairs in which the chosen answer scores higher; 0.5 is a random choice.",
        {"accuracy": TRAINING, "eval_accuracy": HELD_OUT},
        (None, 1),
        0.5,
    ),
    Plot(
        "Margin",
        "Mean score of the chosen answers minus that of the rejected answers.",
        one("margin"),
        reference=0.0,
    ),
    GRADIENT,
    RATE,
)

DPO_PLOTS = (
    Plot(
        "Loss",
        "Per pair (KTO: per answer). The sigmoid loss begins at 0.69, that of KTO at 0.5. A rising held-out loss with "
        "a falling training loss means overfitting.",
        {"loss": TRAINING, "eval_loss": HELD_OUT},
    ),
    Plot(
        "Accuracy",
        "Share of pairs whose chosen answer has the higher reward; 0.5 is a random choice. With a reference, all "
        "rewards are 0 in the first step, so rounding decides.",
        {"accuracy": TRAINING, "eval_accuracy": HELD_OUT},
        (None, 1),
        0.5,
    ),
    Plot(
        "Accuracy of labels",
        "Share of answers whose log-ratio is above the baseline if the label is true, and not above it if it is false.",
        {"label_accuracy": TRAINING, "eval_label_accuracy": HELD_OUT},
        (0, 1),
        0.5,
    ),
    Plot(
        "Margin",
        "Mean reward of the chosen answers minus that of the rejected answers.",
        {"margin": TRAINING, "eval_margin": HELD_OUT},
        reference=0.0,
    ),
    Plot(
        "Rewards",
        "beta times the score that dpo.loss compares (by default the log-ratio to the reference). If both fall, chosen "
        "answers become unlikely too: raise dpo.sft_coef.",
        {
            "chosen_reward": Series("chosen", tone="strong"),
            "rejected_reward": Series("rejected"),
            "eval_chosen_reward": HELD_OUT,
            "eval_rejected_reward": Series("held-out", sparse=True),
        },
        reference=0.0,
    ),
    Plot(
        "Log-probability, nats per answer",
        "Of the answers in the data.",
        {"chosen_logprob": Series("chosen", tone="strong"), "rejected_logprob": Series("rejected")},
    ),
    Plot(
        "Drift, nats per answer",
        "Mean absolute difference of the answers' log-probabilities from the reference.",
        one("drift"),
        (0, None),
    ),
    GRADIENT,
    RATE,
)

PPO_PLOTS = (
    Plot(
        "Reward score",
        "Mean over the answers of a rollout, and over held-out prompts at the first of evaluation.temperatures.",
        {"score": Series("rollouts"), "eval_score": HELD_OUT},
    ),
    Plot(
        "Reward function's share of the score",
        "Mean over the answers of a rollout, and over held-out prompts at the first of evaluation.temperatures.",
        {"function_score": Series("rollouts"), "eval_function_score": HELD_OUT},
    ),
    Plot(
        "Total reward",
        "Mean over answers of the score less its penalties, and less the weighted KL if ppo.kl_in=reward.",
        one("reward"),
    ),
    Plot("Spread of the score", "Standard deviation within a rollout.", one("score_std"), (0, None)),
    Plot(
        "KL to the reference, nats per answer",
        "Distance of the policy from the model that PPO started from; with distillation, from the teacher.",
        one("kl"),
    ),
    Plot(
        "Prompts without a signal",
        "Share of prompts whose answers all have the same score, which gives no answer an advantage.",
        one("alike_prompts"),
        (0, 1),
    ),
    Plot("Entropy, nats per token", "Near zero, the policy always gives the same answer.", one("entropy"), (0, None)),
    Plot("Answer length, tokens", "With the end token.", one("response_length"), (0, None)),
    Plot(
        "Reward and length",
        "Rank correlation over the answers of a rollout. Near 1, the reward is little more than the length.",
        one("length_correlation"),
        (-1, 1),
        0.0,
    ),
    Plot(
        "Reward and judge",
        "Rank correlation over held-out answers, at the first temperature and greedy. Below 0, the reward contradicts "
        "the judge.",
        {
            "judge_correlation": Series("first", sparse=True),
            "judge_correlation_at_0": Series("greedy", tone="strong", sparse=True),
        },
        (-1, 1),
        0.0,
    ),
    Plot("Finished answers", "Share of answers with an end token.", one("eos_rate"), (0, 1)),
    Plot(
        "First ratio, largest distance from 1",
        "In the first minibatch of a rollout the policy is unchanged, so the distance must be rounding error.",
        one("first_ratio_max_deviation"),
        (0, None),
    ),
    Plot(
        "Clipped tokens",
        "Share of tokens that are clipped. Above 0.35 for the policy, steps are too large. With ppo.ratio=sequence, "
        "a larger share is normal.",
        {"clip_fraction": Series("policy"), "value_clip_fraction": CRITIC},
        (0, None),
    ),
    Plot(
        "KL of an update, nats per token",
        "To the policy that sampled the rollout: mean over the optimizer steps, each time before the step.",
        one("approx_kl"),
    ),
    Plot("Policy loss", "Clipped surrogate. Its level has no meaning.", one("policy_loss")),
    Plot("Value loss", "Half the squared error of the critic, clipped.", one("value_loss"), (0, None)),
    Plot(
        "Explained variance",
        "Share of the variance of the returns that the critic predicts; 0 is as good as predicting their mean.",
        one("explained_variance"),
        (None, 1),
        0.0,
    ),
    Plot(
        "Gap between generator and trainer",
        "Mean difference of a token's probability. Above 0.01, generator and trainer are different models.",
        one("generator_gap"),
        (0, None),
    ),
    Plot("Gradient norm", "Before clipping.", {"grad_norm": Series("policy"), "critic_grad_norm": CRITIC}, (0, None)),
    Plot(
        "Learning rate",
        "As scheduled.",
        {"lr": Series("policy", exact=True), "critic_lr": Series("critic", tone="second", exact=True)},
        (0, None),
    ),
)


def stage_section(stage: StageReading, title: str, lead: str, wanted: Sequence[Plot]) -> Markup | None:
    """Build the report section of a stage. Return None if the stage has not started."""
    if not stage.started:
        return None
    notes = []
    if not stage.finished:
        notes.append(f"Unfinished: the last logged step is {stage.last_step}.")
    exported, steps = stage.number("exported_step"), stage.number("steps")
    if exported is not None and exported != steps:
        step = f"{STAGES[stage.name].step} {exported:.0f}"
        notes.append(f"The exported model is that of {step}, the best of the evaluations.")
        if exported:
            notes.append("Its held-out figures look better than they are, because they selected the model.")
    text = " ".join([lead, *notes])
    figures = grid([*(plot.draw(stage) for plot in wanted), accuracy_chart(stage)])
    return section(stage.name, title, text, figures, reward_card(stage.card))
