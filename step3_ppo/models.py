"""The models of PPO: the actor and the critic learn, the reference and the reward model are frozen."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import Engine
from pipeline.config.schema import RunConfig
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.errors import UserError
from pipeline.models.build import EngineChoice, build_policy, build_scorer
from pipeline.models.checks import adopt, verify
from pipeline.models.internals import adapters_off
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource, check_kind, model_folder, resolve
from pipeline.models.stage_models import actor_folder, policy_to_tune, stage_source
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
    reward: the reward model, whose scores have the mean 0 over reference answers; None if `function` alone scores
    reward_std: the standard deviation of these scores
    ensemble: further reward models, with the same mean and standard deviation of their scores
    ensemble_score: the score of an answer from those of all reward models, "mean" or "worst"
    reward_weights: the weight of each reward by name, 1 if it has none
    """

    actor: Engine
    critic: Engine | None
    reference: Engine | None
    reward: Engine | None
    reward_std: float = 1.0
    function: "UserFunction | None" = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    ensemble: Sequence[Engine] = ()
    ensemble_score: str = "mean"

    @property
    def score_unit(self) -> float:
        """The standard deviation of the reward model's part of the score; 1 without a reward model."""
        return 1.0 if self.reward is None else self.reward_std * self.reward_weights.get(REWARD_MODEL, 1.0)

    @property
    def has_rewards(self) -> bool:
        """Whether a reward model or a reward function scores the answers. Distillation has neither."""
        return self.reward is not None or self.function is not None

    @property
    def packing(self) -> bool:
        """Whether all models accept several sequences in a row without padding."""
        return all(isinstance(e.module, Policy | Scorer) and e.module.packs for e in self.engines.values())

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines by role, each once."""
        return self.learning | self.frozen

    @property
    def learning(self) -> dict[str, Engine]:
        """The engines that are trained, by role."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def frozen(self) -> dict[str, Engine]:
        """The engines that only score, by role."""
        reference = None if self.reference is self.actor else self.reference
        roles = {"reference": reference, "reward": self.reward}
        roles |= {f"reward_{number}": engine for number, engine in enumerate(self.ensemble, 2)}
        return {role: engine for role, engine in roles.items() if engine is not None}

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
    """The models that PPO starts from: the SFT model and the reward model, with the same tokenizer.

    critic: the reward model, or the SFT model with a head of zeros if there is no reward model
    ensemble: further reward models (`ppo.reward_ensemble`)
    teacher: the model that replaces the reference (`teacher`); None: the reference is the SFT model
    """

    actor: ModelSource
    critic: ModelSource
    reward: ModelSource | None
    tokenizer: ChatTokenizer
    ensemble: Sequence[ModelSource] = ()
    teacher: ModelSource | None = None


def load_models(config: RunConfig, run_dir: Path) -> ModelSources:
    """Return the models that `actor=`, `reward=` and `teacher=` name, by default those of this run.

    Raises UserError if a model is missing or of another kind.
    """
    policy_folder = actor_folder(config, run_dir)
    actor, tokenizer = policy_to_tune(config, policy_folder)
    if not config.ppo.reward_model:
        critic = stage_source(config, policy_folder)  # a copy: building a scorer changes its configuration
        return ModelSources(actor, critic, None, tokenizer, teacher=load_teacher(config, tokenizer))
    first = run_dir / "reward" if config.reward_path is None else Path(config.reward_path)
    rewards = []
    for folder in (first, *map(Path, config.ppo.reward_ensemble)):
        reward = resolve(config.reward_model or config.model, config.seed, folder=folder)
        check_kind(reward, wanted="ForSequenceClassification")
        reward_tokenizer = load_tokenizer(str(model_folder(folder)), chat_template=None)
        if reward_tokenizer.fingerprint() != tokenizer.fingerprint():
            raise UserError(
                f"the reward model in {folder} has another tokenizer than the actor in {policy_folder}, so it would "
                "score other text than the actor writes; train it with the actor's tokenizer (stage=reward in the same "
                "run)"
            )
        rewards.append(reward)
    return ModelSources(actor, rewards[0], rewards[0], tokenizer, rewards[1:])


def load_teacher(config: RunConfig, tokenizer: ChatTokenizer) -> ModelSource | None:
    """Return the model that `teacher=` names; None if the key is null. Raises UserError for another tokenizer."""
    if config.teacher is None:
        return None
    teacher, own = policy_to_tune(config, Path(config.teacher))
    if own.fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"teacher={config.teacher} has another tokenizer than the student, so their probabilities are of different "
            "tokens: train the student with model.tokenizer of the teacher, or select another teacher"
        )
    return teacher


def build_models(config: RunConfig, sources: ModelSources, *, actor_steps: int, critic_steps: int) -> Models:
    """Build the engines, each with the settings of its role."""
    section = config.ppo
    pad_id = None if sources.tokenizer.pad_id in sources.tokenizer.end_ids else sources.tokenizer.pad_id

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
    elif section.asks_reference:
        reference = actor if adapters else build_policy(sources.actor, choice(section.reference_engine))
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    verify(actor, max_length=longest)
    if sources.teacher is not None and reference is not None:
        verify(reference, max_length=longest)
    elif reference is not None and reference is not actor:
        adopt(reference, actor)
    mean, std = reference_level(sources.reward)
    critic = None
    if section.advantage == "gae":
        critic_optimizer = optimizer_config(section, steps=critic_steps, lr=section.critic_lr)
        critic_adapters = adapters if sources.critic.quantize != "none" else None  # its base is frozen then
        learns = choice(section.critic_engine, optimizer=critic_optimizer, lora=critic_adapters)
        # A copy of the reward model values unfinished answers below its mean score, so the critic starts without the
        # shift of the scores (docs/engineering/measurements.md, "Start of the critic").
        critic = build_scorer(sources.critic, learns, pad_id=pad_id, zero_head=sources.reward is None)
        verify(critic, max_length=longest)
    function = None
    if section.reward_function is not None:
        from pipeline.evaluation.user_function import load_function

        function = load_function(section.reward_function, section.reward_threads)
    if sources.reward is None:
        return Models(actor, critic, reference, None, function=function, reward_weights=section.reward_weights)
    reward = build_scorer(sources.reward, choice(section.reward_engine), pad_id=pad_id, shift=mean)
    if critic is not None:
        adopt(reward, critic)
    else:
        verify(reward, max_length=longest)
    ensemble = []
    for source in sources.ensemble:
        own_mean, own_std = reference_level(source)
        member = build_scorer(source, choice(section.reward_engine), pad_id=pad_id, shift=own_mean, scale=std / own_std)
        verify(member, max_length=longest)
        ensemble.append(member)
    return Models(
        actor, critic, reference, reward, std, function, section.reward_weights, ensemble, section.ensemble_score
    )


def reference_level(reward: ModelSource | None) -> tuple[float, float]:
    """Return mean and standard deviation of a reward model's scores of reference answers; 0 and 1 if it has none."""
    if reward is None:
        return 0.0, 1.0
    return float(getattr(reward.config, "reward_mean", 0.0)), float(getattr(reward.config, "reward_std", 0.0)) or 1.0
