"""The configuration keys: types, bounds, defaults and descriptions.

Every default is defined here and nowhere else. Hydra composes `conf/` into a dictionary, `validate`
(in `check.py`) turns the dictionary into a `RunConfig`. Only the entry points of stages read it.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

FilePath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A path, with a leading ~ expanded."""


def _deepspeed_file(value: Any) -> Any:
    """Return the content of a DeepSpeed file, which the run stores and reuses on restart. Raises ValueError."""
    if value is None:
        return None
    from engine import deepspeed_json  # a late import: it imports torch

    return deepspeed_json.load(value)


DeepSpeedFile = Annotated[dict[str, Any] | None, BeforeValidator(_deepspeed_file)]


class Section(BaseModel):
    """A group of keys.

    Unknown keys, infinity and NaN are rejected. A number becomes text if the key needs text (`name=7`).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), coerce_numbers_to_str=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise PydanticCustomError for true or false where a number is needed: pydantic reads true as 1."""
        if isinstance(value, bool):
            annotation = cls.model_fields[str(info.field_name)].annotation
            kinds = {annotation, *get_args(annotation)}
            for number in (int, float):
                if number in kinds and bool not in kinds:
                    raise PydanticCustomError(f"{number.__name__}_type", "not a number")  # type: ignore[arg-type]
        return value


def inner_section(annotation: Any, *, in_lists: bool = False) -> type[BaseModel] | None:
    """Return the section type in an annotation `X`, `X | None` or (with `in_lists`) `list[X]`; None for plain values."""
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
        "pretrained", description="random builds `architecture` with random weights and never contacts the hub"
    )
    architecture: dict[str, Any] | None = Field(
        None, description="model_type and the fields of its transformers configuration, for weights=random"
    )
    tokenizer: str | None = Field(None, description="tokenizer folder or hub id; `train` trains one on the run's data")
    chat_template: FilePath | None = Field(
        None, description="file with a Jinja chat template, instead of the tokenizer's own"
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation of transformers")
    fused_kernels: Literal["auto", "liger", "none"] = Field(
        "auto",
        description="norm, rotary embedding and gate, in training and generation. liger: those of Liger Kernel; none: those of transformers; auto: liger on GPUs if liger-kernel is installed (`pip install '.[gpu]'`) and supports the model's family, otherwise none",
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    tensor_plan: dict[str, str] | None = Field(
        None,
        description="how engine.tensor_parallel splits modules, {pattern: style}; default: the plan that comes with the model",
    )


class RecordedSize(Section):
    rows: int = Field(ge=1, description="rows of the training split")
    prompt_tokens: float = Field(gt=0, description="mean tokens of a prompt, with the chat template")
    answer_tokens: float = Field(gt=0, description="mean tokens of an answer")


class SourceConfig(Section):
    path: FilePath | None = Field(
        None, description="local file or folder: jsonl, json, csv, tsv (also compressed), parquet, arrow"
    )
    eval_path: FilePath | None = Field(
        None,
        description="local file or folder of held-out data; without it, eval_fraction of the prompts of `path` are held out",
    )
    hub: str | None = Field(None, description="data set id on the hub")
    subset: str | None = Field(None, description="configuration name of the hub set")
    split: str = Field("train", description="split of the hub set to train on")
    eval_split: str | None = Field(
        None,
        description="held-out split of the hub set; without it, eval_fraction of the prompts of `split` are held out",
    )
    builtin: Literal["demo", "tasks"] | None = Field(
        None,
        description="rows that are generated when a stage starts: demo, conversations and preferences of zerochat; tasks, questions and answers of reasoning-gym (data.task)",
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="share of this source in the mix, relative to the weights of the other sources; null (default): use every row of every source",
    )
    stages: list[Literal["sft", "reward", "ppo"]] = Field(
        ["sft", "reward", "ppo"],
        description="stages that this source serves; dpo reads the pairs of the sources that serve reward",
    )
    size: RecordedSize | None = Field(
        None, description="recorded size of the training split, which stage=plan reads instead of a hub set"
    )
    columns: dict[str, str] = Field({}, description="columns to rename: {name in the file: name that zerochat expects}")


class TaskConfig(Section):
    name: str = Field("spell_backward", description="name of a task of reasoning-gym")
    options: dict[str, Any] = Field({}, description="options of the task, {name: value}")
    rows: int = Field(
        8000,
        ge=16,
        le=1_000_000,
        description="number of generated training rows, before repeated questions are removed",
    )
    held_out: int = Field(256, ge=1, le=100_000, description="number of generated held-out questions")


class DataConfig(Section):
    name: str = Field(description="short name, used in run names and tables")
    path: FilePath | None = Field(None, description="one local file or folder, instead of `sources`")
    sources: list[SourceConfig] = Field([], description="where the data comes from")
    eval_fraction: float = Field(
        0.05, gt=0, lt=1, description="share of prompts to hold out if a source has no held-out split"
    )
    stage_shares: dict[Literal["sft", "reward", "ppo"], float] = Field(
        {"sft": 0.2, "reward": 0.4, "ppo": 0.4},
        description="shares of the prompts if one source serves several stages of a run: no two stages read the same prompt, and dpo reads the shares of reward and ppo; with the default, a stage that runs alone reads all rows",
    )
    bad_row_limit: float = Field(
        0.05, ge=0, le=1, description="largest share of unusable rows; a file with more is rejected"
    )
    demo_examples: int = Field(12000, ge=200, description="number of generated examples (data=demo)")
    task: TaskConfig = TaskConfig()


class EngineSettings(Section):
    auto: bool = Field(
        False,
        description="before each stage, choose the fastest settings that fit into memory: zero_stage, both offload tiers, activation_checkpointing and the micro-batch",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="what is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters"
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="compute precision, with fp32 master weights; auto is bf16 on a GPU (fp16 below compute capability 8.0) and fp32 on a CPU",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="where fp32 master weights and moments are stored and updated: none (on the device), cpu (in host memory), nvme (in files)",
    )
    offload_parameters: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="where parameter shards are stored between uses: none (on the device), cpu (in host memory), nvme (in files, needs zero_stage=3)",
    )
    offload_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the parameters whose optimizer states are offloaded; the device updates the other parameters",
    )
    nvme_path: FilePath | None = Field(
        None, description="folder for the offload files of this run (nvme); default: the temporary folder"
    )
    sub_group_size: int = Field(
        2**23,
        ge=1024,
        description="number of parameters that an offloaded optimizer updates at a time; a larger value needs more host memory with nvme",
    )
    activation_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: about a third more compute, far less memory"
    )
    compile_blocks: bool = Field(False, description="torch.compile each transformer block")
    shard_ranks: int | None = Field(
        None,
        ge=1,
        description="number of adjacent ranks that shard one copy of the model; each such group holds a replica (HSDP); null: all ranks shard one copy",
    )
    compress: Literal["none", "gather8", "reduce8", "both"] = Field(
        "none",
        description="communicate in 8 bits (zero_stage 1 or higher): gather8 for parameter gathers, reduce8 for gradient reductions, or both",
    )
    states: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="precision of AdamW's states: fp32 master weights and moments (12 bytes per parameter), or bf16 with stochastic rounding (6 bytes per parameter)",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="number of adjacent ranks that split each weight matrix and process the same data"
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="number of adjacent ranks that split the tokens of each packed row, for long conversations",
    )
    pipeline_parallel: int = Field(
        1,
        ge=1,
        description="number of pipeline ranks, each with consecutive blocks of the model; only for stage=sft",
    )
    loss_scale_power: int = Field(16, ge=0, le=32, description="fp16: the initial loss scale is 2 to this power")
    loss_scale_window: int = Field(1000, ge=1, description="fp16: steps without overflow before the loss scale doubles")
    hang_seconds: float | None = Field(
        None,
        ge=1,
        description="seconds without progress of any rank after which a stage that takes steps ends with exit status 5; longer than the longest time between two collectives, for example a rollout; null: 10 times the slowest step or phase so far, at least 60 (docs/guides/resuming.md#when-a-run-hangs)",
    )
    deepspeed: DeepSpeedFile = Field(
        None,
        description="DeepSpeed configuration (JSON file); its values override the engine keys, see docs/reference/deepspeed.md",
    )

    def changed_by(self, changes: Mapping[str, Any]) -> "EngineSettings":
        """Return these settings with the changes of one of PPO's models (`ppo.actor_engine` and similar keys)."""
        return EngineSettings.model_validate({**self.model_dump(), **changes})

    def engine_fields(self) -> dict[str, Any]:
        """Return the settings as fields of `engine.EngineConfig`. `dtype` may be "auto"; the DeepSpeed file is left out."""
        from engine import LossScale  # a late import: it imports torch

        fields = self.model_dump(exclude={"auto", "deepspeed", "hang_seconds", "loss_scale_power", "loss_scale_window"})
        return {**fields, "loss_scale": LossScale(self.loss_scale_power, self.loss_scale_window)}

    def deepspeed_file(self, *, trains: bool) -> Mapping[str, Any]:
        """Return the DeepSpeed file for a model; without `optimizer` and `scheduler` if the model is frozen."""
        frozen = () if trains else ("optimizer", "scheduler")
        return {key: value for key, value in (self.deepspeed or {}).items() if key not in frozen}


class StageSection(Section):
    epochs: float = Field(1.0, gt=0, le=1_000_000, description="passes over the stage's data")
    steps: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="largest number of optimizer steps (ppo: rollouts); null: epochs set the number",
    )
    batch_size: int = Field(
        64, ge=1, le=1_000_000, description="conversations, pairs or prompts per step, over all ranks"
    )
    max_length: int = Field(
        1024,
        ge=8,
        description="largest number of tokens in a sequence; longer ones are truncated, or dropped if no usable answer would remain",
    )
    micro_batch_tokens: int = Field(
        8192,
        ge=8,
        description="largest number of tokens (with padding) in a forward and backward pass on a rank; a longer sequence has a micro-batch of its own",
    )
    lr: float = Field(1e-5, ge=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="learning rate schedule after the warm-up"
    )
    warmup: float = Field(
        0.03, ge=0, le=1, description="share of the steps in which the learning rate rises from 0 to lr"
    )
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a share of lr")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay; not applied to biases and norms")
    beta1: float = Field(0.9, ge=0, lt=1, description="beta1 of Adam: decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="beta2 of Adam: decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="epsilon of Adam")
    max_grad_norm: float = Field(1.0, ge=0, description="clip gradients to this global norm; 0: do not clip")
    lora: LoraConfig = LoraConfig()
    log_every: int = Field(1, ge=1, description="steps between lines of metrics.jsonl")
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0: evaluate at the end only")
    save_every: int = Field(
        0, ge=0, description="steps between checkpoints; 0: save about every tenth of the stage and every 15 minutes"
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="number of checkpoints to retain during training, the newest ones"
    )
    eval_examples: int = Field(256, ge=1, description="held-out examples per evaluation")
    export: Literal["last", "best"] = Field(
        "last",
        description="model to export: the last one, or the best of the evaluations (eval_every) by held-out loss (sft, dpo), accuracy (reward), or the judge's score (ppo; without a judge, the reward within ppo.kl_budget)",
    )


class SftSection(StageSection):
    packing: bool = Field(
        True, description="put conversations into one row without padding; attention does not cross conversations"
    )
    loss_on: Literal["assistant", "all"] = Field("assistant", description="tokens that the loss includes")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout during training, if the model has dropout layers")


class DpoSection(StageSection):
    lr: float = Field(1e-6, ge=0, description="peak learning rate")
    warmup: float = Field(
        0.1, ge=0, le=1, description="share of the steps in which the learning rate rises from 0 to lr"
    )
    loss: Literal["sigmoid", "ipo", "length_normalized", "simpo", "orpo", "kto"] = Field(
        "sigmoid",
        description="sigmoid: negative log-likelihood of the preferences (Rafailov et al., 2023); ipo: squared distance to a fixed margin, which bounds the log-ratios even if no labels contradict each other (Azar et al., 2023); length_normalized: sigmoid of log-ratios per token (Lambert et al., 2024); simpo: log-probabilities per token and a target margin (Meng et al., 2024); orpo: SFT loss and odds ratio (Hong et al., 2024); kto: answers labelled desirable or not, without pairs (Ethayarajh et al., 2024); simpo and orpo have no reference",
    )
    beta: float = Field(
        0.1,
        gt=0,
        description="sigmoid, length_normalized, kto: strength of the pull towards the reference (the model that DPO starts from), reward = beta * log-ratio to the reference; ipo: beta = 1 / (2 * margin), where margin is the target difference of the log-ratios; simpo: reward = beta * log-probability per token; orpo: weight of the odds ratio",
    )
    margin: float = Field(0.0, ge=0, description="simpo: the reward difference that a pair should exceed (gamma)")
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="assumed share of pairs with the wrong label (conservative DPO; Mitchell, 2023); only for loss=sigmoid and loss=length_normalized",
    )
    sft_coef: float = Field(
        0.0,
        ge=0,
        description="weight of an added SFT loss: the cross-entropy per token of the chosen answer, which prevents good answers from becoming unlikely (Pang et al., 2024)",
    )

    undesirable_weight: float = Field(
        1.0, gt=0, description="kto: weight of an answer with label=false, relative to an answer with label=true"
    )

    @property
    def reads_pairs(self) -> bool:
        """Whether the stage learns from pairs; otherwise from answers with labels."""
        return self.loss != "kto"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model that the stage starts from."""
        return self.loss not in ("simpo", "orpo")


class RewardSection(StageSection):
    init: Literal["auto", "sft", "base"] = Field(
        "auto",
        description="initial weights: sft, the SFT model of this run; base, the base model; auto: sft, or base if reward_model is set or the run has no SFT model",
    )
    centering: float = Field(
        0.01, ge=0, description="coefficient of (chosen + rejected)^2, a term that pulls scores towards 0"
    )
    use_margin: bool = Field(False, description="subtract the margin column of the data from the score difference")


GuardAction = Literal["off", "warn", "stop", "rollback"]

ROLE_ENGINES = ("actor_engine", "critic_engine", "reference_engine", "reward_engine")
"""Keys of PPO that change the engine settings of one model."""


class PpoSection(StageSection):
    kl_coef: float = Field(0.05, ge=0, description="weight of the KL divergence per token to the reference")
    guard: Annotated[GuardAction, BeforeValidator(lambda value: "off" if value is False else value)] = Field(
        "stop",
        description="reaction of the training guard to a sign that PPO has gone wrong (docs/guides/did_it_help.md lists the signs). off: no checks; warn: print the sign and continue; stop: end the stage and export the best step; rollback: restart from the best step with 0.3 times the learning rates, at most twice, then stop",
    )
    kl_budget: float = Field(
        10.0,
        gt=0,
        description="without a judge: largest KL to the reference, in nats per answer, of a step that export=best and the guard may select; among these steps, the held-out reward decides",
    )
    kl_in: Literal["reward", "loss"] | None = Field(
        None,
        description="where the KL penalty applies: reward, subtracted from the score (Ziegler et al., 2019), or loss, a term with its own gradient (Shao et al., 2024); null: loss for grpo, reinforce_baseline and online_dpo, otherwise reward",
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] | None = Field(
        None,
        description="KL estimator per token (Schulman, 2020): k1, the log-ratio; k2, half its square; k3, exp(-log-ratio) - 1 + log-ratio; k3_weighted, k3 times the policy ratio, only in the loss (DeepSeek-V3.2; DeepSeek-AI, 2025); null: k1 if kl_in is reward, k3 if kl_in is loss",
    )
    reference: bool | None = Field(
        None,
        description="compute log-probabilities under the reference (the model that PPO starts from); null: if kl_coef is above 0, the guard is on or advantage is online_dpo; with kl_coef=0 (but not for online_dpo), only for the metric kl",
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="target KL in nats per sequence; kl_coef adapts to it (Ziegler et al., 2019); null: kl_coef is constant",
    )
    kl_horizon: int = Field(10000, ge=1, description="number of sequences over which kl_coef adapts to kl_target")
    update_epochs: int = Field(4, ge=1, description="training passes over each rollout")
    minibatches: int = Field(1, ge=1, description="optimizer steps per pass over a rollout")
    shared_forward: bool | None = Field(
        None,
        description="with minibatches=1, the first update reuses the forward passes that scored the rollout, which holds their activations in memory until then; null: if the plan has the memory",
    )
    reward_model: bool = Field(
        True,
        description="score answers with a reward model; false: score with reward_function only, and skip the reward stage",
    )
    reward_function: FilePath | None = Field(
        None,
        description="FILE.py:NAME, a function (answer, row) -> number, or a dictionary of numbers, that scores answers; with a reward model, the scores are added",
    )
    reward_weights: dict[str, float] = Field(
        {},
        description="weights of the rewards in the score, {name: weight}. The name model is the reward model; other names are those that reward_function returns in a dictionary; a reward without a weight has the weight 1",
    )
    reward_ensemble: list[FilePath] = Field(
        [],
        description="folders of further reward models (model or stage folders); their scores are scaled to the mean and standard deviation of the first reward model",
    )
    ensemble_score: Literal["mean", "worst"] = Field(
        "mean",
        description="with reward_ensemble: the score of an answer is the mean of the reward models' scores, or the lowest (Coste et al., 2023)",
    )
    reward_threads: int = Field(
        1,
        ge=1,
        description="concurrent calls of reward_function on a rank, for a function that waits for a service or a sandbox; above 1, calls run in threads",
    )
    clip: float = Field(0.2, gt=0, description="the policy ratio is clipped to 1 - clip .. 1 + clip")
    clip_high: float | None = Field(
        None,
        gt=0,
        description="the policy ratio is clipped to 1 - clip .. 1 + clip_high (Yu et al., 2025); null: the value of clip",
    )
    ratio: Literal["token", "sequence"] = Field(
        "token",
        description="policy ratio: token, of each token; sequence, the geometric mean over the tokens of an answer, with equal weight for each answer (GSPO; Zheng et al., 2025)",
    )
    dual_clip: float | None = Field(
        3.0, gt=1, description="upper bound on the ratio if the advantage is negative (Ye et al., 2020); null: no bound"
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="largest change of a value from its old value in the value loss; null: no clipping"
    )
    critic_lr: float = Field(1e-5, ge=0, description="peak learning rate of the critic")
    critic_warmup: int = Field(
        0, ge=0, description="number of rollouts at the start in which only the critic is trained"
    )
    advantage: Literal["gae", "rloo", "grpo", "reinforce", "reinforce_baseline", "online_dpo", "distill"] = Field(
        "gae",
        description="baseline of the advantages: gae, a critic; rloo and grpo, the other answers to the same prompt, without a critic; reinforce, all answers of the rollout (REINFORCE++; Hu, 2025); reinforce_baseline, the other answers to the same prompt, whitened over the rollout; online_dpo, the gradient of DPO on the best and the worst answer to each prompt (Guo et al., 2024); distill, the log-ratio of the teacher and the policy at each token, without a reward (method=distill)",
    )
    pair_beta: float = Field(
        0.1, gt=0, description="online_dpo: strength of the pull towards the reference, as dpo.beta for loss=sigmoid"
    )
    divide_by_std: bool = Field(
        True,
        description="grpo: divide advantages by the standard deviation over the answers to a prompt; false: do not divide (Dr. GRPO; Liu et al., 2025)",
    )
    samples: int = Field(1, ge=1, description="answers per prompt; a rollout has ppo.batch_size * samples answers")
    resample: int = Field(
        0,
        ge=0,
        description="largest number of rounds per rollout that replace the prompts whose answers all have the same score by new prompts (dynamic sampling of DAPO; Yu et al., 2025); 0: none; not for gae and reinforce",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of GAE")
    whiten_advantages: bool = Field(
        True,
        description="normalize the advantages of gae, reinforce and reinforce_baseline to mean 0 and variance 1 over the global batch",
    )
    missing_end_penalty: float = Field(
        1.0,
        ge=0,
        description="subtracted from the score of an answer that was cut off at rollout.max_new_tokens, in standard deviations of the reward model's scores (without a reward model: in units of the score)",
    )
    unfinished: Literal["penalize", "mask"] = Field(
        "penalize",
        description="answers that were cut off at rollout.max_new_tokens. penalize: subtract missing_end_penalty from the score; mask: leave them out of the updates, without a penalty (overlong filtering of DAPO; Yu et al., 2025)",
    )
    length_penalty: float = Field(
        0.0, ge=0, description="subtracted from the score for each token of an answer beyond length_free"
    )
    length_free: int = Field(
        0,
        ge=0,
        description="tokens in an answer that length_penalty does not count; a value close to rollout.max_new_tokens gives the soft limit of DAPO (Yu et al., 2025)",
    )
    score_clip: float | None = Field(
        None, gt=0, description="scores are clipped to the range -score_clip .. score_clip; null: no clipping"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    ptx_coef: float = Field(0.0, ge=0, description="weight of the SFT loss that is added to the policy loss (PTX)")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of the moving average of the actor's weights (with bias correction), which is then the evaluated and exported model; null: no average",
    )
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="weight of each token's policy loss: the ratio of the trainer's to the generator's probability, at most this value (usually 2); null: no weight",
    )
    importance_weights: Literal["token", "sequence", "token_mask", "sequence_mask"] = Field(
        "token",
        description="with importance_cap: token and sequence truncate the ratio of a token, or of an answer, to the cap; token_mask and sequence_mask leave out tokens, or answers, with a ratio above the cap",
    )
    keep_answers: int = Field(
        8,
        ge=0,
        description="number of answers of each rollout to write to rollouts.jsonl, with scores and rewards",
    )
    keep_tokens: bool = Field(
        False,
        description="also write the log-probabilities, value, reward and advantage of each token to rollouts.jsonl",
    )
    ratio_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest mean deviation of the ratio from 1 in the first minibatch; null: chosen by precision",
    )
    actor_engine: dict[str, Any] = Field({}, description="engine keys for the actor only")
    critic_engine: dict[str, Any] = Field({}, description="engine keys for the critic only")
    reference_engine: dict[str, Any] = Field({}, description="engine keys for the reference only")
    reward_engine: dict[str, Any] = Field({}, description="engine keys for the reward model only")

    @property
    def kl_counts_in(self) -> Literal["reward", "loss"]:
        """`kl_in`, or the usual choice for `advantage`."""
        in_loss = ("grpo", "reinforce_baseline", "online_dpo", "distill")
        return self.kl_in or ("loss" if self.advantage in in_loss else "reward")

    @property
    def asks_reference(self) -> bool:
        """`reference`, or whether the KL counts (`kl_coef` above 0), the guard watches it or the estimator needs it."""
        if self.reference is not None:
            return self.reference
        return self.kl_coef > 0 or self.guard != "off" or self.advantage in ("online_dpo", "distill")


class RolloutSection(Section):
    temperature: float = Field(1.0, gt=0, description="sampling temperature; training divides logits by the same value")
    top_k: int = Field(0, ge=0, description="sample from the k likeliest tokens; 0: all tokens, as PPO assumes")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the smallest set of tokens with this total probability; PPO assumes 1"
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="exclude tokens with less than this share of the highest probability; PPO assumes 0",
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="above 1: tokens that occur in the prompt or answer become less likely; PPO assumes 1"
    )
    min_new_tokens: int = Field(0, ge=0, description="smallest number of tokens in an answer; PPO assumes 0")
    max_new_tokens: int = Field(256, ge=1, description="largest number of tokens in an answer, including its end token")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="strings that end an answer, in addition to the end token: rollout.stop='[\"Human:\"]'",
    )
    max_prompt_tokens: int = Field(
        512, ge=1, description="largest number of tokens in a prompt; longer prompts are dropped and counted"
    )
    batch_size: int = Field(64, ge=1, description="largest number of sequences that a rank decodes at a time")
    cache_bytes: int | None = Field(
        None,
        ge=1,
        description="largest size of the key-value cache of a rank, in bytes; a smaller cache decodes fewer sequences at a time; null: half of the free memory",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="number of adjacent ranks that split the generator's weight matrices and answer the same prompts",
    )
    stream: bool = Field(
        False,
        description="load the generator's blocks to the device one at a time, for models that do not fit into device memory",
    )
    keep: bool = Field(
        True, description="retain the generator's weights and cache between rollouts; false: release them"
    )
    park_optimizer: bool = Field(False, description="move optimizer states to host memory during generation (GPU)")
    parity_check_every: int = Field(
        50,
        ge=0,
        description="compare generator and trainer (parity check) in the first two rollouts and in every N-th one; 0: never",
    )


class EvaluationSection(Section):
    prompts: int = Field(128, ge=1, description="held-out prompts that the base, SFT and PPO (or DPO) models answer")
    temperatures: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = Field(
        None,
        min_length=1,
        description="sampling temperatures of the held-out answers, 0 for greedy decoding; null: rollout.temperature and 0",
    )
    best_of: int = Field(
        4,
        ge=1,
        description="number of SFT answers per prompt; the report compares PPO with the answer of these that has the highest score; sampled at the first of temperatures that is not 0; 1: no such comparison",
    )
    table_rows: int = Field(16, ge=1, description="number of held-out prompts that the report shows")
    judge: FilePath | None = Field(
        None,
        description="FILE.py:NAME, a function (answer, row) -> number from 0 to 1 that grades the held-out answers: the gold score; not used in training",
    )
    pair_judge: FilePath | None = Field(
        None,
        description="FILE.py:NAME, a function (first answer, second answer, row) -> number from 0 (the second is better) to 1 (the first is better), or None without a verdict; compares each held-out answer after PPO or DPO with the SFT answer, in both orders",
    )
    judge_threads: int = Field(
        1, ge=1, description="concurrent calls of judge and of pair_judge on a rank, see ppo.reward_threads"
    )


class TrackingSection(Section):
    kind: Literal["wandb", "tensorboard", "both", "none"] = Field(
        "wandb", description="where metrics go, in addition to metrics.jsonl; tensorboard writes RUN/tensorboard"
    )
    project: str = Field("zerochat", description="wandb project")
    entity: str | None = Field(None, description="wandb entity")


class ProfileSection(Section):
    steps: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="first and last step of each stage to record with torch.profiler, into the stage's folder: profile.steps=[5,8]",
    )
    ranks: Literal["first", "all"] = Field("first", description="ranks that are recorded")


class PlanSection(Section):
    device: (
        Literal[
            "b200", "h200", "h100", "a100", "a100-40gb", "l40s", "a6000", "rtx4090", "rtx3090", "a10g", "l4", "v100",
            "t4",
        ]
        | None
    ) = Field(None, description="stage=plan: GPU to plan for, by its data sheet; null: measure this machine")  # fmt: skip
    ranks: int = Field(1, ge=1, description="number of GPUs of plan.device (for this machine: ranks)")
    price_per_gpu_hour: float | None = Field(None, ge=0, description="price of one GPU for one hour, in any currency")


class RunConfig(Section):
    name: str | None = Field(None, description="run name; default: made from model, data and time")
    run_dir: FilePath | None = Field(None, description="run folder, instead of runs/<name>")
    stage: Literal["all", "sft", "reward", "dpo", "ppo", "plan"] = Field(
        "all",
        description="stage to run; all: every stage; plan: only print the hours and the memory that all stages need, and what they cost",
    )
    method: Literal["ppo", "dpo", "distill"] = Field(
        "ppo",
        description="stages of stage=all: ppo runs SFT, a reward model and PPO; dpo runs SFT and direct preference optimisation; distill runs SFT and on-policy distillation from `teacher` (short form of ppo=distill)",
    )
    seed: int = Field(1, ge=0, lt=2**32, description="seed of all random numbers")
    ranks: int | None = Field(
        None, ge=1, description="processes on this machine; default: one per GPU, or one on a CPU"
    )
    restarts: int = Field(
        0,
        ge=0,
        le=1000,
        description="number of times that a stage starts again from its newest checkpoint after a crash, a lost rank or a hang",
    )
    actor: FilePath | None = Field(
        None,
        description="model folder (or stage folder) that PPO or DPO starts from; default: the sft stage of this run",
    )
    reward_path: FilePath | None = Field(
        None,
        description="model folder (or stage folder) of the reward model; default: the reward stage of this run (short form: reward=PATH)",
    )
    teacher: FilePath | None = Field(
        None,
        description="model folder (or stage folder) of the teacher, for method=distill; with the tokenizer of the student",
    )
    debug: bool = Field(False, description="show tracebacks")
    model: ModelConfig
    reward_model: ModelConfig | None = Field(
        None, description="base of the reward model and critic; default: the base model of the policy"
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
    plan: PlanSection = PlanSection()
