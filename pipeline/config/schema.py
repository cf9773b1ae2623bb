"""The configuration, key by key: types, bounds, defaults, and what each key means.

This is the one place where a default stands. Hydra composes `conf/` into a dictionary, `validate`
(in `check.py`) turns the dictionary into a `RunConfig`, and stages read it at their edge only.
"""

import os
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

FilePath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A path as typed, with a leading ~ spelt out."""


def _deepspeed_file(value: Any) -> Any:
    """The content of a DeepSpeed configuration, so that a run keeps what it was started with. Raises ValueError."""
    if value is None:
        return None
    from engine import deepspeed_json  # here: it brings torch along

    return deepspeed_json.load(value)


DeepSpeedFile = Annotated[dict[str, Any] | None, BeforeValidator(_deepspeed_file)]


class Section(BaseModel):
    """A group of keys. Unknown keys are refused; a number where text is asked (`name=7`) is read as text."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), coerce_numbers_to_str=True)


def inner_section(annotation: Any, *, in_lists: bool = False) -> type[BaseModel] | None:
    """The section a key holds: `X`, `X | None`, and with `in_lists` `list[X]`; None for plain values."""
    if get_origin(annotation) in (list, dict) and not in_lists:
        return None
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


class LoraConfig(Section):
    rank: int = Field(0, ge=0, description="rank of the adapters (peft); 0 trains all parameters")
    alpha: float = Field(16.0, gt=0, description="adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' input; ppo needs 0")
    targets: list[str] | str = Field("all-linear", description="module names that get adapters, or all-linear")


class ModelConfig(Section):
    name: str = Field(description="short name, used in run names and tables")
    hub: str | None = Field(None, description="hub id, used when `path` is not given")
    path: FilePath | None = Field(None, description="local folder in Hugging Face format (safetensors)")
    weights: Literal["pretrained", "random"] = Field(
        "pretrained", description="random builds `architecture` with random weights and never asks a hub"
    )
    architecture: dict[str, Any] | None = Field(
        None, description="model_type and the fields of its transformers configuration, for weights=random"
    )
    tokenizer: str | None = Field(None, description="tokenizer folder or hub id; `train` trains one on the run's data")
    chat_template: FilePath | None = Field(
        None, description="file with a Jinja chat template, instead of the tokenizer's own"
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation of transformers")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    tensor_plan: dict[str, str] | None = Field(
        None,
        description="how engine.tensor_parallel splits modules, {pattern: style}; default what comes with the model",
    )


class SourceConfig(Section):
    path: FilePath | None = Field(
        None, description="local file or folder: jsonl, json, csv, tsv (also compressed), parquet, arrow"
    )
    eval_path: FilePath | None = Field(
        None, description="local file or folder held out; otherwise a share of `path` is"
    )
    hub: str | None = Field(None, description="data set id on the hub")
    subset: str | None = Field(None, description="configuration name of the hub set")
    split: str = Field("train", description="split of the hub set to train on")
    eval_split: str | None = Field(None, description="split of the hub set held out; otherwise a share of `split` is")
    builtin: Literal["demo"] | None = Field(None, description="data that zerochat makes itself")
    weight: float | None = Field(
        None,
        gt=0,
        description="share of this source in the mix, relative to the others; null for all uses every row of all",
    )
    stages: list[Literal["sft", "reward", "ppo"]] = Field(
        ["sft", "reward", "ppo"],
        description="stages this source serves; dpo reads the pairs of those that serve reward",
    )
    columns: dict[str, str] = Field({}, description="column names to read as other ones: {their name: our name}")


class DataConfig(Section):
    name: str = Field(description="short name, used in run names and tables")
    path: FilePath | None = Field(None, description="one local file or folder, instead of `sources`")
    sources: list[SourceConfig] = Field([], description="where the data comes from")
    eval_fraction: float = Field(
        0.05, gt=0, lt=1, description="share of prompts held out where a source has no held-out split"
    )
    stage_shares: dict[Literal["sft", "reward", "ppo"], float] = Field(
        {"sft": 0.2, "reward": 0.4, "ppo": 0.4},
        description="disjoint shares of the prompts, for a source that serves several stages with one kind of record; dpo, which needs neither of the other two, has the shares of reward and ppo",
    )
    bad_row_limit: float = Field(0.05, ge=0, le=1, description="share of unusable rows above which a file is refused")
    demo_examples: int = Field(12000, ge=200, description="size of the made data (data=demo)")


class EngineSettings(Section):
    auto: bool = Field(
        False,
        description="before each stage choose what fits and is fastest: zero_stage, both offload tiers, activation_checkpointing and the micro-batch",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too"
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="compute precision, fp32 masters; auto is bf16 on a GPU (fp16 where it has no bf16: before compute capability 8.0) and fp32 on a CPU",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none", description="where fp32 masters and moments live and step: device, host memory, files"
    )
    offload_parameters: Literal["none", "cpu", "nvme"] = Field(
        "none", description="where parameter shards live between uses; nvme needs zero_stage=3"
    )
    offload_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the parameters whose optimizer is offloaded; the rest steps on the device",
    )
    nvme_path: FilePath | None = Field(
        None, description="folder for the run's private files of the nvme tiers; default the temporary folder"
    )
    sub_group_size: int = Field(
        2**23,
        ge=1024,
        description="parameters that an offloaded optimizer steps at once; host memory of the nvme tier grows with it",
    )
    activation_checkpointing: bool = Field(
        False, description="recompute activations in backward: a third more compute, far less memory"
    )
    compile_blocks: bool = Field(False, description="torch.compile each transformer block")
    shard_ranks: int | None = Field(
        None,
        ge=1,
        description="neighbouring ranks that share one copy of the model, replicated across the others (HSDP); null is all",
    )
    compress: Literal["none", "gather8", "reduce8", "both"] = Field(
        "none",
        description="8 bits on the wire from zero_stage=1 on: gathers of parameters, reductions of gradients, or both",
    )
    states: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="what AdamW keeps: fp32 masters and moments (12 bytes a parameter), or bf16 alone, stochastically rounded (6)",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="neighbouring ranks that hold each matrix between them and work on the same data"
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="neighbouring ranks that hold the tokens of each packed row between them, for long conversations",
    )
    pipeline_parallel: int = Field(
        1,
        ge=1,
        description="ranks that hold the model's blocks one after another and pass micro-batches on; for stage=sft",
    )
    pipeline_schedule: Literal["1f1b", "gpipe"] = Field(
        "1f1b", description="one forward, one backward in turn; or all forwards, then all backwards (more activations)"
    )
    loss_scale_power: int = Field(16, ge=0, le=32, description="fp16: initial loss scale is 2**this")
    loss_scale_window: int = Field(1000, ge=1, description="fp16: good steps before the scale doubles")
    deepspeed: DeepSpeedFile = Field(
        None, description="DeepSpeed configuration (JSON file): what it says counts, see docs/reference/deepspeed.md"
    )


class StageSection(Section):
    epochs: float = Field(1.0, gt=0, description="passes over the stage's data")
    steps: int | None = Field(
        None, ge=1, description="cap on optimizer steps (ppo: on rollouts); epochs decide otherwise"
    )
    batch_size: int = Field(64, ge=1, description="global batch over all ranks: conversations, pairs or prompts a step")
    max_length: int = Field(
        1024, ge=8, description="tokens a sequence; longer ones are cut, or dropped where a cut makes no sense"
    )
    micro_batch_tokens: int = Field(
        8192,
        ge=8,
        description="most tokens of a forward and backward pass on a rank, padding included where rows are padded; a longer sequence goes alone",
    )
    lr: float = Field(1e-5, ge=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="learning rate after the warm-up")
    warmup: float = Field(0.03, ge=0, le=1, description="share of the steps in which the rate rises")
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="rate at the end, as a share of lr")
    weight_decay: float = Field(0.0, ge=0, description="decoupled decay; biases and norms have none")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first decay")
    beta2: float = Field(0.95, ge=0, lt=1, description="Adam's second decay")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    max_grad_norm: float = Field(1.0, ge=0, description="clip to this global norm; 0 does not clip")
    lora: LoraConfig = LoraConfig()
    log_every: int = Field(1, ge=1, description="steps between lines of metrics.jsonl")
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0 evaluates at the end only")
    save_every: int = Field(
        0, ge=0, description="steps between checkpoints; 0 saves about every tenth of the stage, and every 15 minutes"
    )
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept while training")
    eval_examples: int = Field(256, ge=1, description="held-out examples an evaluation")
    export: Literal["last", "best"] = Field(
        "last",
        description="model that is exported: the last, or the best by held-out loss (sft, dpo), accuracy (reward) or score (ppo), of every eval_every steps",
    )


class SftSection(StageSection):
    packing: bool = Field(True, description="conversations stand in one row without padding and can't see each other")
    loss_on: Literal["assistant", "all"] = Field("assistant", description="tokens that count in the loss")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout while training, where the model has it")


class DpoSection(StageSection):
    lr: float = Field(1e-6, ge=0, description="peak learning rate")
    warmup: float = Field(0.1, ge=0, le=1, description="share of the steps in which the rate rises")
    beta: float = Field(
        0.1,
        gt=0,
        description="how dear it is to move away from the reference, the model DPO starts from: rewards are beta times log-ratios to it; ipo: half the reciprocal of the lead in log-ratio that is aimed at",
    )
    loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid",
        description="sigmoid, the log-likelihood of the preferences (Rafailov et al., 2023); ipo, the squared distance to a fixed lead, which does not run away on pairs without contradiction (Azar et al., 2023)",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="share of the pairs that are taken to be labelled the wrong way round (conservative DPO; Mitchell, 2023); sigmoid only",
    )
    sft_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the chosen answer's cross-entropy a token beside the loss, so that good answers don't become unlikely (Pang et al., 2024)",
    )


class RewardSection(StageSection):
    init: Literal["auto", "sft", "base"] = Field(
        "auto",
        description="starting weights: this run's SFT model or the base model; auto prefers SFT unless reward_model is set",
    )
    centering: float = Field(0.01, ge=0, description="coefficient of (chosen + rejected)^2, keeps scores around 0")
    use_margin: bool = Field(False, description="subtract the data's margin from the score difference")


ROLE_ENGINES = ("actor_engine", "critic_engine", "reference_engine", "reward_engine")
"""PPO's keys that change the engine of one of its models."""


class PpoSection(StageSection):
    kl_coef: float = Field(0.05, ge=0, description="weight of the per-token KL to the reference")
    kl_in: Literal["reward", "loss"] | None = Field(
        None,
        description="where that KL counts: reward, log-ratios subtracted from the score (Ziegler et al., 2019), or loss, a term with its own gradient (Shao et al., 2024); null is loss for grpo, reward else",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="what that KL is made of, a token (Schulman, 2020): k1, the log-ratio; k2, half its square; k3, exp(-log-ratio) - 1 + log-ratio; null is k1 in the reward, k3 in the loss",
    )
    reference: bool | None = Field(
        None,
        description="answers are scored by the reference, the model PPO starts from; null is where kl_coef is above 0, and with kl_coef=0 true has it for the figure kl alone",
    )
    kl_target: float | None = Field(None, gt=0, description="nats a sequence; adapts kl_coef (Ziegler et al., 2019)")
    kl_horizon: int = Field(10000, ge=1, description="sequences over which kl_coef adapts")
    update_epochs: int = Field(4, ge=1, description="passes over each rollout")
    minibatches: int = Field(1, ge=1, description="optimizer steps a pass over a rollout")
    shared_forward: bool | None = Field(
        None,
        description="with one minibatch, actor and critic learn first from the forwards that scored the rollout, whose graphs are kept until then; null is where the plan has the memory",
    )
    reward_model: bool = Field(
        True,
        description="answers are scored by a reward model; false leaves that to reward_function, and no reward stage runs",
    )
    reward_function: FilePath | None = Field(
        None,
        description="FILE.py:NAME, a function (answer, row) -> number that scores answers; with a reward model the two are added",
    )
    reward_threads: int = Field(
        1,
        ge=1,
        description="calls of reward_function at a time on a rank, for one that waits (for a service, a sandbox); more than 1 come from threads",
    )
    clip: float = Field(0.2, gt=0, description="policy ratio is clipped to 1 - clip .. 1 + clip")
    clip_high: float | None = Field(
        None, gt=0, description="policy ratio is clipped to 1 - clip .. 1 + clip_high (Yu et al., 2025); null for clip"
    )
    dual_clip: float | None = Field(
        3.0, gt=1, description="bound on the ratio where the advantage is negative (Ye et al., 2020); null for none"
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="values are clipped to within this of the old ones; null for none"
    )
    critic_lr: float = Field(1e-5, ge=0, description="peak learning rate of the critic")
    critic_warmup: int = Field(0, ge=0, description="rollouts in which only the critic learns")
    advantage: Literal["gae", "rloo", "grpo", "reinforce"] = Field(
        "gae",
        description="what an answer is held against: gae, a critic; rloo and grpo, the other answers to its prompt, without a critic; reinforce, all answers of the rollout (REINFORCE++; Hu, 2025)",
    )
    divide_by_std: bool = Field(
        True,
        description="grpo: advantages are divided by the standard deviation over a prompt's answers; false does not (Dr. GRPO; Liu et al., 2025)",
    )
    samples: int = Field(1, ge=1, description="answers a prompt; a rollout has ppo.batch_size times as many")
    gamma: float = Field(1.0, gt=0, le=1, description="discount a token")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of GAE")
    whiten_advantages: bool = Field(
        True, description="advantages of gae and reinforce to mean 0, variance 1 over the global batch"
    )
    missing_end_penalty: float = Field(
        1.0, ge=0, description="subtracted from the score of an answer without an end token"
    )
    length_penalty: float = Field(
        0.0, ge=0, description="subtracted from the score for each token of an answer beyond length_free"
    )
    length_free: int = Field(
        0,
        ge=0,
        description="tokens that an answer may have without length_penalty; close to rollout.max_new_tokens it is the soft limit of DAPO (Yu et al., 2025)",
    )
    score_clip: float | None = Field(None, gt=0, description="scores are clipped to +- this")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    ptx_coef: float = Field(0.0, ge=0, description="weight of the SFT loss mixed into the policy's (PTX)")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of averaged actor weights; the exported model is the average; null for none",
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="weigh a token's policy loss with trainer's over generator's probability, at most this (2 is usual); null for no weight",
    )
    keep_answers: int = Field(
        8,
        ge=0,
        description="answers of each rollout that are written to rollouts.jsonl, with what they scored and earned",
    )
    keep_tokens: bool = Field(
        False, description="in rollouts.jsonl each token's log-probabilities, value, reward and advantage as well"
    )
    ratio_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest mean deviation of the first minibatch's ratio from 1; null chooses by precision",
    )
    actor_engine: dict[str, Any] = Field({}, description="engine keys for the actor alone")
    critic_engine: dict[str, Any] = Field({}, description="engine keys for the critic alone")
    reference_engine: dict[str, Any] = Field({}, description="engine keys for the reference alone")
    reward_engine: dict[str, Any] = Field({}, description="engine keys for the reward model alone")

    @property
    def kl_counts_in(self) -> Literal["reward", "loss"]:
        """`kl_in`, or what is usual for the way advantages are made."""
        return self.kl_in or ("loss" if self.advantage == "grpo" else "reward")

    @property
    def asks_reference(self) -> bool:
        """`reference`, or whether the KL to it counts."""
        return self.kl_coef > 0 if self.reference is None else self.reference


class RolloutSection(Section):
    temperature: float = Field(1.0, gt=0, description="sampling temperature; logits are divided by it in training too")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all, and PPO wants all")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the smallest set with this mass; PPO wants 1")
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="drop tokens with less than this share of the likeliest one's probability; PPO wants 0",
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="above 1 makes tokens that stand in prompt or answer less likely; PPO wants 1"
    )
    min_new_tokens: int = Field(0, ge=0, description="no answer ends before it has as many tokens; PPO wants 0")
    max_new_tokens: int = Field(256, ge=1, description="tokens an answer may have, its end token included")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="strings that end an answer where they are complete, beside the end token: rollout.stop='[\"Human:\"]'",
    )
    max_prompt_tokens: int = Field(512, ge=1, description="longer prompts are dropped, and counted")
    batch_size: int = Field(64, ge=1, description="sequences decoded together on a rank")
    cache_bytes: int | None = Field(
        None,
        ge=1,
        description="bytes the key-value cache may take on a rank; fewer sequences are decoded together where it is short; null is half of what is free",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="neighbouring ranks that split the generator's matrices between them and answer the same prompts",
    )
    stream: bool = Field(
        False, description="bring the generator's blocks to the device one at a time, for models that don't fit it"
    )
    keep: bool = Field(
        True, description="keep the generator's weights, packs and cache between rollouts; false frees them"
    )
    park_optimizer: bool = Field(
        False, description="optimizer states wait in host memory while answers are generated (GPU)"
    )
    parity_check_every: int = Field(
        50,
        ge=0,
        description="the parity check compares generator and trainer in the first two rollouts and in every N-th one; 0 never",
    )


class EvaluationSection(Section):
    prompts: int = Field(128, ge=1, description="held-out prompts answered by base, SFT and PPO (or DPO) model")
    table_rows: int = Field(16, ge=1, description="of these, rows shown in the report")
    judge: FilePath | None = Field(
        None,
        description="FILE.py:NAME, a function (answer, row) -> number from 0 to 1 that judges these answers and trains nothing: the gold score of data that is not the demo's",
    )
    judge_threads: int = Field(1, ge=1, description="calls of judge at a time on a rank, as ppo.reward_threads")


class TrackingSection(Section):
    kind: Literal["wandb", "none"] = Field("wandb", description="where metrics go beside metrics.jsonl")
    project: str = Field("zerochat", description="wandb project")
    entity: str | None = Field(None, description="wandb entity")


class ProfileSection(Section):
    steps: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="first and last step of each stage to record with torch.profiler, into the stage's folder: profile.steps=[5,8]",
    )
    ranks: Literal["first", "all"] = Field("first", description="ranks that are recorded")


class RunConfig(Section):
    name: str | None = Field(None, description="run name; default from model, data and time")
    run_dir: FilePath | None = Field(None, description="run folder, instead of runs/<name>")
    stage: Literal["all", "sft", "reward", "dpo", "ppo", "plan"] = Field(
        "all", description="what to run; plan only says what all of it will need and take"
    )
    method: Literal["ppo", "dpo"] = Field(
        "ppo",
        description="what all of it is: ppo, SFT, a reward model and PPO; dpo, SFT and direct preference optimisation",
    )
    seed: int = Field(1, ge=0, description="seed of everything random")
    ranks: int | None = Field(None, ge=1, description="processes on this machine; default one a GPU, one on a CPU")
    actor: FilePath | None = Field(
        None, description="model folder (or stage folder) PPO or DPO starts from; default this run's sft"
    )
    reward_path: FilePath | None = Field(
        None,
        description="model folder (or stage folder) of the reward model; default this run's reward (reward=PATH for short)",
    )
    debug: bool = Field(False, description="show tracebacks")
    model: ModelConfig
    reward_model: ModelConfig | None = Field(
        None, description="base of the reward model and critic; default the same as the policy's"
    )
    data: DataConfig
    engine: EngineSettings = EngineSettings()
    sft: SftSection = SftSection()
    reward: RewardSection = RewardSection()
    dpo: DpoSection = DpoSection()
    ppo: PpoSection = PpoSection()
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()
    tracking: TrackingSection = TrackingSection()
    profile: ProfileSection = ProfileSection()
