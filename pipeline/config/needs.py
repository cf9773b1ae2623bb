"""Settings that need another setting: without it they have no effect, or the two contradict each other."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from pipeline.config.messages import as_written, unmet_need
from pipeline.config.schema import PlanSection, RunConfig
from pipeline.config.stages import STAGES

WHITENED, SMOOTHED = ("gae", "reinforce", "reinforce_baseline"), ("sigmoid", "robust", "length_normalized")
# Each row has a setting, the setting that it needs, and whether a configuration has the latter. A setting is KEY=VALUE.
# KEY alone stands for each value except null and the default. As the needed setting it stands for any other value.
NEEDS: tuple[tuple[str, str, Callable[[RunConfig], object]], ...] = (
    *((f"{stage}.export=best", f"{stage}.eval_every=100", attrgetter(f"{stage}.eval_every")) for stage in STAGES),
    *(
        (f"{stage}.lora.{key}", f"{stage}.lora.rank=16", attrgetter(f"{stage}.lora.rank"))
        for stage in STAGES
        for key in ("alpha", "dropout", "targets")
    ),
    ("dpo.label_smoothing", "dpo.loss=sigmoid", lambda config: config.dpo.loss in SMOOTHED),
    ("dpo.loss=robust", "dpo.label_smoothing=0.1", lambda config: config.dpo.label_smoothing),  # 0: the same as sigmoid
    ("dpo.margin", "dpo.loss=simpo", lambda config: config.dpo.loss == "simpo"),
    ("dpo.undesirable_weight", "dpo.loss=kto", lambda config: config.dpo.loss == "kto"),
    ("dpo.sft_coef", "dpo.loss=sigmoid", lambda config: config.dpo.reads_pairs),
    ("dpo.loss=orpo", "dpo.sft_coef=0", lambda config: not config.dpo.sft_coef),  # ORPO contains the SFT loss
    ("ppo.reward_model=false", "ppo.reward_function=FILE.py:NAME", lambda config: _has_scores(config)),
    ("reward_path", "ppo.reward_model=true", lambda config: config.ppo.reward_model),
    ("ppo.reward_ensemble", "ppo.reward_model=true", lambda config: config.ppo.reward_model),
    ("ppo.ensemble_score", "ppo.reward_ensemble=[FOLDER]", lambda config: config.ppo.reward_ensemble),
    ("ppo.reward_threads", "ppo.reward_function=FILE.py:NAME", lambda config: config.ppo.reward_function),
    ("ppo.critic_warmup", "ppo.advantage=gae", lambda config: config.ppo.advantage == "gae"),
    ("ppo.value_clip", "ppo.advantage=gae", lambda config: config.ppo.advantage == "gae"),
    ("ppo.gamma", "ppo.advantage=gae", lambda config: config.ppo.advantage in ("gae", "reinforce")),
    ("ppo.whiten_advantages", "ppo.advantage=gae", lambda config: config.ppo.advantage in WHITENED),
    ("ppo.pair_beta", "ppo.advantage=online_dpo", lambda config: config.ppo.advantage == "online_dpo"),
    ("ppo.divide_by_std", "ppo.advantage=grpo", lambda config: config.ppo.advantage == "grpo"),
    ("ppo.resample", "ppo.advantage=grpo", lambda config: config.ppo.compares_answers),
    ("ppo.ratio=sequence", "ppo.advantage=grpo", lambda config: config.ppo.compares_answers),  # one for each answer
    # Online DPO ranks answers by their scores, and trains on both answers of a pair.
    ("ppo.advantage=online_dpo", "ppo.kl_in=loss", lambda config: config.ppo.kl_in != "reward"),
    ("ppo.advantage=online_dpo", "ppo.unfinished=penalize", lambda config: config.ppo.unfinished == "penalize"),
    # Distillation learns from the teacher alone. It minimizes the KL to the teacher, which kl_coef would add again.
    ("teacher", "method=distill", lambda config: "distill" in (config.method, config.ppo.advantage)),
    ("method=distill", "ppo.advantage=distill", lambda config: config.ppo.advantage == "distill"),
    ("ppo.advantage=distill", "teacher=FOLDER", lambda config: config.teacher),
    ("ppo.advantage=distill", "ppo.reward_model=false", lambda config: not config.ppo.reward_model),
    ("ppo.advantage=distill", "ppo.kl_coef=0", lambda config: not config.ppo.kl_coef),
    *(
        (key, "ppo.advantage", lambda config: config.ppo.advantage != "distill")
        for key in ("reward_path", "ppo.reward_function", "ppo.score_clip", "ppo.length_penalty")
    ),
    ("ppo.reference=false", "ppo.advantage", lambda config: config.ppo.advantage not in ("online_dpo", "distill")),
    ("ppo.reference=false", "ppo.kl_coef=0", lambda config: not config.ppo.kl_coef),
    ("ppo.kl_target", "ppo.kl_coef=0.05", lambda config: config.ppo.kl_coef),
    ("ppo.kl_horizon", "ppo.kl_target=6", lambda config: config.ppo.kl_target),
    ("ppo.kl_estimator=k1", "ppo.kl_in=reward", lambda config: config.ppo.kl_counts_in == "reward"),  # gradient: 0
    ("ppo.kl_estimator=k3_weighted", "ppo.kl_in=loss", lambda config: config.ppo.kl_counts_in == "loss"),
    # The shared forward passes are those over all answers. PTX trains the actor on other data as well.
    ("ppo.shared_forward=true", "ppo.minibatches=1", lambda config: config.ppo.minibatches == 1),
    ("ppo.shared_forward=true", "ppo.unfinished=penalize", lambda config: config.ppo.unfinished == "penalize"),
    ("ppo.shared_forward=true", "ppo.ptx_coef=0", lambda config: not config.ppo.ptx_coef or _has_critic(config)),
    ("ppo.dual_clip", "ppo.loss=clip", lambda config: config.ppo.loss == "clip"),
    ("ppo.importance_weights", "ppo.importance_cap=2", lambda config: config.ppo.importance_cap),
    ("ppo.length_free", "ppo.length_penalty=0.01", lambda config: config.ppo.length_penalty),
    ("ppo.length_free", "rollout.max_new_tokens", lambda config: _has_penalized_lengths(config)),
    ("ppo.export=best", "ppo.ema=null", lambda config: config.ppo.ema is None),  # both select the exported actor
    (
        "evaluation.judge_threads",
        "evaluation.judge=FILE.py:NAME or evaluation.pair_judge=FILE.py:NAME",
        lambda config: config.evaluation.judge or config.evaluation.pair_judge,
    ),
    ("rollout.batch_size", "rollout.generator=engine", lambda config: config.rollout.generator == "engine"),
    ("rollout.stream=true", "rollout.tensor_parallel=1", lambda config: config.rollout.tensor_parallel == 1),
    *((f"plan.{key}", "stage=plan", lambda config: config.stage == "plan") for key in PlanSection.model_fields),
    ("plan.ranks", "plan.device=NAME", lambda config: config.plan.device),
)


def _has_scores(config: RunConfig) -> bool:
    return config.ppo.reward_function is not None or config.ppo.advantage == "distill"


def _has_critic(config: RunConfig) -> bool:
    return config.ppo.advantage == "gae"


def _has_penalized_lengths(config: RunConfig) -> bool:
    return config.ppo.length_free < config.rollout.max_new_tokens


def unmet_needs(config: RunConfig, stages: Sequence[str]) -> Iterable[str]:
    """Yield a message for each setting without the setting that it needs. Sections of other stages are not checked."""
    defaults = RunConfig.model_construct(model=config.model, data=config.data)
    for setting, needed, is_met in NEEDS:
        key, _, wanted = setting.partition("=")
        value, section = attrgetter(key)(config), key.partition(".")[0]
        is_set = as_written(value) == wanted if wanted else value not in (None, attrgetter(key)(defaults))
        if is_set and (section in stages or section not in STAGES) and not is_met(config):
            actual = as_written(attrgetter(needed.partition("=")[0])(config))
            yield unmet_need(f"{key}={as_written(value)}", needed, actual)
