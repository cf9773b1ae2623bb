"""The models of PPO: actor and critic learn, reference and reward model stand still. A function may score, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import Engine
from pipeline.config.engines import engine_settings
from pipeline.config.schema import RunConfig
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.errors import UserError
from pipeline.evaluation.user_function import UserFunction, load_function
from pipeline.launch.manifest import stage_inputs
from pipeline.models.adapters import adapters_off
from pipeline.models.build import EngineChoice, build_policy, build_scorer
from pipeline.models.checks import adopt, verify
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource, check_kind, model_folder, resolve
from pipeline.models.stage_models import policy_to_tune, stage_source
from pipeline.stages.settings import optimizer_config


@dataclass(frozen=True)
class Models:
    """`reference` is the actor itself where that has adapters, and scores without them; None where no KL to it is
    wanted. `critic` is None where answers are held against each other, `reward` where `function` alone scores.
    """

    actor: Engine
    critic: Engine | None
    reference: Engine | None
    reward: Engine | None
    reward_mean: float = 0.0
    function: UserFunction | None = None

    @property
    def pack(self) -> bool:
        """Whether all take several sequences in a row without padding."""
        return all(isinstance(e.module, Policy | Scorer) and e.module.packs for e in self.engines.values())

    @property
    def engines(self) -> dict[str, Engine]:
        """All there are, each once, by role."""
        reference = None if self.reference is self.actor else self.reference
        found = {"actor": self.actor, "critic": self.critic, "reference": reference, "reward": self.reward}
        return {role: engine for role, engine in found.items() if engine is not None}

    @property
    def learning(self) -> dict[str, Engine]:
        """Those that are trained, by role."""
        return {role: engine for role, engine in self.engines.items() if role in ("actor", "critic")}

    @contextmanager
    def referring(self) -> Iterator[Engine | None]:
        """The reference policy, to score with, where there is one."""
        if self.reference is self.actor:
            with adapters_off(self.actor):
                yield self.actor
        else:
            yield self.reference


@dataclass(frozen=True)
class ModelSources:
    """Where PPO starts: the SFT model and the reward model, with one tokenizer between them. The critic begins as the
    reward model, or without one as the SFT model with a head of zeros.
    """

    actor: ModelSource
    critic: ModelSource
    reward: ModelSource | None
    tokenizer: ChatTokenizer


def load_models(config: RunConfig, run_dir: Path) -> ModelSources:
    """The models that `actor=` and `reward=` name, or this run's.

    Raises UserError where one is missing or of another kind.
    """
    folders = stage_inputs(config, run_dir, "ppo")
    actor_folder, reward_folder = folders["actor"], folders.get("reward")
    assert actor_folder is not None
    actor, tokenizer = policy_to_tune(config, actor_folder)
    if reward_folder is None:
        critic = stage_source(config, actor_folder)  # one of its own: building a scorer changes its configuration
        return ModelSources(actor, critic, None, tokenizer)
    reward = resolve(config.reward_model or config.model, config.seed, folder=reward_folder)
    check_kind(reward, wanted="ForSequenceClassification")
    theirs = load_tokenizer(str(model_folder(reward_folder)), chat_template=None)
    if theirs.fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"the reward model in {reward_folder} has another tokenizer than the actor in {actor_folder}, so it would "
            "read other text than the actor writes; train it with the actor's tokenizer (stage=reward in the same run)"
        )
    return ModelSources(actor, reward, reward, tokenizer)


def build_models(config: RunConfig, sources: ModelSources, *, actor_steps: int, critic_steps: int) -> Models:
    """The engines, each with its own settings."""
    section = config.ppo
    pad_id = None if sources.tokenizer.pad_id in sources.tokenizer.end_ids else sources.tokenizer.pad_id

    def choice(own: dict[str, Any], **rest: Any) -> EngineChoice:
        return EngineChoice(engine_settings(config.engine, own), **rest)

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
        return Models(actor, critic, reference, None, function=function)
    reward = build_scorer(sources.reward, choice(section.reward_engine), pad_id=pad_id)
    if critic is not None:
        adopt(reward, critic)
    else:
        verify(reward, max_length=longest)
    mean = float(getattr(sources.reward.config, "reward_mean", 0.0))
    return Models(actor, critic, reference, reward, mean, function)
