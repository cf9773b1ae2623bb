"""The models of PPO: the actor and the critic learn, the reference and the reward model are frozen."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import Engine
from pipeline.config.schema import RunConfig
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.models.build import EngineChoice, build_policy, build_scorer
from pipeline.models.checks import adopt, verify
from pipeline.models.internals import adapters_off
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource, resolve
from pipeline.models.stage_models import actor_folder, load_reward, load_teacher, policy_to_tune
from pipeline.stages.start import optimizer_config

if TYPE_CHECKING:
    from pipeline.evaluation.user_function import UserFunction

REWARD_MODEL = "model"  # the name of the reward model in `ppo.reward_weights`


@dataclass(frozen=True)
class Models:
    """The engines of PPO, and the reward function.

    critic: None for estimators that compare the answers to a prompt
    reference: None without a KL to it; the actor itself if that has adapters, and then scores without them; the teacher
        of a distillation
    rewards: the reward models; over reference answers their scores have the mean 0 and the same standard deviation
    reward_std: this standard deviation
    ensemble_score: the score of an answer from those of all reward models, "mean" or "worst"
    reward_weights: the weight of each reward by name, 1 if it has none
    """

    actor: Engine
    critic: Engine | None
    reference: Engine | None
    rewards: Sequence[Engine] = ()
    reward_std: float = 1.0
    function: "UserFunction | None" = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    ensemble_score: str = "mean"

    @property
    def score_unit(self) -> float:
        """The standard deviation of the reward model's part of the score; 1 if the score has no such part."""
        return abs(self.reward_std * self.reward_weights.get(REWARD_MODEL, 1.0)) or 1.0 if self.rewards else 1.0

    @property
    def has_rewards(self) -> bool:
        """Whether a reward model or a reward function scores the answers. Distillation has neither."""
        return bool(self.rewards) or self.function is not None

    @property
    def packing(self) -> bool:
        """Whether all models accept several sequences in a row without padding."""
        return all(isinstance(e.module, Policy | Scorer) and e.module.packs for e in self.engines.values())

    @property
    def takes_turns(self) -> bool:
        """Whether the reward function answers with messages, so that a rollout consists of episodes."""
        return self.function is not None and self.function.takes_turns

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines by role, each once: those that are trained, and then those that only score."""
        engines = {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})
        if self.reference is not None and self.reference is not self.actor:
            engines["reference"] = self.reference
        for number, reward in enumerate(self.rewards, 1):
            engines["reward" if number == 1 else f"reward_{number}"] = reward
        return engines

    @contextmanager
    def reference_policy(self) -> Iterator[Engine | None]:
        """Provide the engine that computes the reference's log-probabilities; None without a reference."""
        if self.reference is self.actor:
            with adapters_off(self.actor.module):
                yield self.actor
        else:
            yield self.reference


@dataclass(frozen=True)
class ModelSources:
    """The models that PPO starts from: the SFT model and the reward models, with the same tokenizer.

    critic: the first reward model, or the SFT model with a head of zeros if there is no reward model
    rewards: the reward model and those of `ppo.reward_ensemble`
    teacher: the model that replaces the reference (`teacher`); None: the reference is the SFT model
    """

    actor: ModelSource
    critic: ModelSource
    tokenizer: ChatTokenizer
    rewards: Sequence[ModelSource] = ()
    teacher: ModelSource | None = None


def load_models(config: RunConfig, run_dir: Path) -> ModelSources:
    """Return the models that `actor=`, `reward=` and `teacher=` name, by default those of this run.

    Raises UserError if a model is missing or of another kind.
    """
    policy_folder = actor_folder(config, run_dir)
    actor, tokenizer = policy_to_tune(config, policy_folder)
    if not config.ppo.reward_model:
        # a copy, because building a scorer changes its configuration
        critic = resolve(config.model, config.seed, folder=policy_folder)
        teacher = None if config.teacher is None else load_teacher(config, config.teacher, tokenizer)
        return ModelSources(actor, critic, tokenizer, teacher=teacher)
    first = run_dir / "reward" if config.reward_path is None else Path(config.reward_path)
    folders = (first, *map(Path, config.ppo.reward_ensemble))
    rewards = [load_reward(config, folder, tokenizer) for folder in folders]
    return ModelSources(actor, rewards[0], tokenizer, rewards)


def build_models(config: RunConfig, sources: ModelSources, *, actor_steps: int, critic_steps: int) -> Models:
    """Build the engines, each with the settings of its role."""
    section = config.ppo
    pad_id = sources.tokenizer.model_pad_id

    def choice(changes: dict[str, Any], **rest: Any) -> EngineChoice:
        return EngineChoice(config.engine.changed_by(changes), **rest)

    adapters = section.lora if section.lora.rank else None
    actor = build_policy(
        sources.actor,
        choice(section.actor_engine, optimizer=optimizer_config(section, steps=actor_steps), lora=adapters),
        generates=True,
    )
    reference = None
    if sources.teacher is not None:
        reference = build_policy(sources.teacher, choice(section.reference_engine))
    elif section.needs_reference:
        reference = actor if adapters else build_policy(sources.actor, choice(section.reference_engine))
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    verify(actor, max_length=longest)
    if sources.teacher is not None and reference is not None:
        verify(reference, max_length=longest)
    elif reference is not None and reference is not actor:
        adopt(reference, actor)
    critic = None
    if section.advantage == "gae":
        critic_optimizer = optimizer_config(section, steps=critic_steps, lr=section.critic_lr)
        critic_adapters = adapters if sources.critic.quantize != "none" else None  # its base is frozen then
        learns = choice(section.critic_engine, optimizer=critic_optimizer, lora=critic_adapters)
        # A copy of the reward model values unfinished answers below its mean score, so the critic starts without the
        # shift of the scores (docs/engineering/measurements.md, "Start of the critic").
        critic = build_scorer(sources.critic, learns, pad_id=pad_id, zero_head=not sources.rewards)
        verify(critic, max_length=longest)
    function = None
    if section.reward_function is not None:
        from pipeline.evaluation.user_function import load_function

        function = load_function(section.reward_function, section.reward_threads)
    levels = [reference_level(source) for source in sources.rewards]
    std = levels[0][1] if levels else 1.0
    rewards = list[Engine]()
    for source, (mean, own_std) in zip(sources.rewards, levels, strict=True):
        engine = choice(section.reward_engine)
        reward = build_scorer(source, engine, pad_id=pad_id, shift=mean, scale=std / own_std)
        if critic is not None and not rewards:
            adopt(reward, critic)
        else:
            verify(reward, max_length=longest)
        rewards.append(reward)
    return Models(actor, critic, reference, rewards, std, function, section.reward_weights, section.ensemble_score)


def reference_level(reward: ModelSource) -> tuple[float, float]:
    """Return mean and standard deviation of a reward model's scores of reference answers; 0 and 1 if it has none."""
    return float(getattr(reward.config, "reward_mean", 0.0)), float(getattr(reward.config, "reward_std", 0.0)) or 1.0
