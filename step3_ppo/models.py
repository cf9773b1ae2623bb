"""The models of PPO: the actor and the critic learn, the reference and the reward model are frozen."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import Engine
from pipeline.config.schema import RunConfig
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.errors import UserError
from pipeline.evaluation.user_function import UserFunction, load_function
from pipeline.models.adapters import adapters_off
from pipeline.models.build import EngineChoice, build_policy, build_scorer
from pipeline.models.checks import adopt, verify
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource, check_kind, model_folder, resolve
from pipeline.models.stage_models import actor_folder, policy_to_tune, stage_source
from pipeline.stages.start import optimizer_config


@dataclass(frozen=True)
class Models:
    """The engines of PPO, and the reward function.

    critic: None for estimators that compare the answers to a prompt
    reference: None without a KL to it; the actor itself if that has adapters, and then scores without them
    reward: the reward model; None if `function` alone scores
    reward_mean: the reward model's mean score of reference answers, which PPO subtracts
    reward_weights: the weight of each reward by name, 1 if it has none
    """

    actor: Engine
    critic: Engine | None
    reference: Engine | None
    reward: Engine | None
    reward_mean: float = 0.0
    function: UserFunction | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)

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
        return {role: engine for role, engine in roles.items() if engine is not None}

    @contextmanager
    def reference_policy(self) -> Iterator[Engine | None]:
        """Provide the engine that computes the reference's log-probabilities; None without a reference."""
        if self.reference is self.actor:
            with adapters_off(self.actor):
                yield self.actor
        else:
            yield self.reference


@dataclass(frozen=True)
class ModelSources:
    """The models that PPO starts from: the SFT model and the reward model, with the same tokenizer.

    critic: the reward model, or the SFT model with a head of zeros if there is no reward model
    """

    actor: ModelSource
    critic: ModelSource
    reward: ModelSource | None
    tokenizer: ChatTokenizer


def load_models(config: RunConfig, run_dir: Path) -> ModelSources:
    """Return the models that `actor=` and `reward=` name, by default those of this run.

    Raises UserError if a model is missing or of another kind.
    """
    policy_folder = actor_folder(config, run_dir)
    actor, tokenizer = policy_to_tune(config, policy_folder)
    if not config.ppo.reward_model:
        critic = stage_source(config, policy_folder)  # a copy: building a scorer changes its configuration
        return ModelSources(actor, critic, None, tokenizer)
    reward_folder = run_dir / "reward" if config.reward_path is None else Path(config.reward_path)
    reward = resolve(config.reward_model or config.model, config.seed, folder=reward_folder)
    check_kind(reward, wanted="ForSequenceClassification")
    reward_tokenizer = load_tokenizer(str(model_folder(reward_folder)), chat_template=None)
    if reward_tokenizer.fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"the reward model in {reward_folder} has another tokenizer than the actor in {policy_folder}, so it would "
            "score other text than the actor writes; train it with the actor's tokenizer (stage=reward in the same run)"
        )
    return ModelSources(actor, reward, reward, tokenizer)


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
    if section.asks_reference:
        reference = actor if adapters else build_policy(sources.actor, choice(section.reference_engine))
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    verify(actor, max_length=longest)
    if reference is not None and reference is not actor:
        adopt(reference, actor)
    critic = None
    if section.advantage == "gae":
        critic_optimizer = optimizer_config(section, steps=critic_steps, lr=section.critic_lr)
        learns = choice(section.critic_engine, optimizer=critic_optimizer)
        critic = build_scorer(sources.critic, learns, pad_id=pad_id, zero_head=sources.reward is None)
        verify(critic, max_length=longest)
    function = None
    if section.reward_function is not None:
        function = load_function(section.reward_function, section.reward_threads)
    if sources.reward is None:
        return Models(actor, critic, reference, None, function=function, reward_weights=section.reward_weights)
    reward = build_scorer(sources.reward, choice(section.reward_engine), pad_id=pad_id)
    if critic is not None:
        adopt(reward, critic)
    else:
        verify(reward, max_length=longest)
    mean = float(getattr(sources.reward.config, "reward_mean", 0.0))
    return Models(actor, critic, reference, reward, mean, function, section.reward_weights)
