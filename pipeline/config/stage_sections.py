"""The base class of all groups of configuration keys, and the keys of the stages: SFT, reward model, DPO and PPO."""

import os
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

FilePath = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(os.path.expanduser),
    PlainSerializer(os.path.abspath, return_type=str, when_used="json"),
]
"""A path, with a leading ~ expanded. Files have it absolute, because their readers may have another current folder."""


class Section(BaseModel):
    """A group of keys. The text below a key is its description in messages, in `--help` and in the documentation.

    Unknown keys, infinity and NaN are rejected. A number becomes text if the key needs text (`name=7`).
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise PydanticCustomError for true or false where a number is needed: pydantic reads true as 1."""
        if isinstance(value, bool):
            annotation = cls.model_fields[str(info.field_name)].annotation
            kinds = {annotation, *get_args(annotation)}
            if kinds & {int, float} and bool not in kinds:
                raise PydanticCustomError("bool_as_number", "Input should be a number")
        return value


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """rank of the adapters (peft); 0 trains all parameters"""
    alpha: float = Field(16.0, gt=0)
    """adapters are scaled by alpha / rank"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout on the adapters' input; ppo needs 0"""
    targets: list[str] | str = "all-linear"
    """module names that get adapters, or all-linear"""


class StageSection(Section):
    epochs: float = Field(1.0, gt=0, le=1_000_000)
    """passes over the stage's data"""
    steps: int | None = Field(None, ge=1, le=1_000_000)
    """largest number of optimizer steps (ppo: rollouts); null: epochs set the number"""
    batch_size: int = Field(64, ge=1, le=1_000_000)
    """examples per step over all ranks: conversations (sft), pairs (reward, dpo; kto: answers) or prompts (ppo)"""
    max_length: int = Field(1024, ge=8)
    """largest number of tokens in a sequence; longer ones are truncated, or dropped if no usable answer would remain"""
    micro_batch_tokens: int = Field(8192, ge=8)
    """largest number of tokens (with padding) in a forward and backward pass on a rank; a longer sequence has a
    micro-batch of its own"""
    lr: float = Field(1e-5, ge=0)
    """peak learning rate"""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """learning rate schedule after the warm-up"""
    warmup: float = Field(0.03, ge=0, le=1)
    """share of the steps in which the learning rate rises from 0 to lr"""
    final_lr_ratio: float = Field(0.0, ge=0, le=1)
    """learning rate at the end, as a share of lr"""
    weight_decay: float = Field(0.0, ge=0)
    """decoupled weight decay; not applied to biases and norms"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """beta1 of Adam: decay of the first moment"""
    beta2: float = Field(0.95, ge=0, lt=1)
    """beta2 of Adam: decay of the second moment"""
    eps: float = Field(1e-8, gt=0)
    """epsilon of Adam"""
    max_grad_norm: float = Field(1.0, ge=0)
    """clip gradients to this global norm; 0: do not clip"""
    lora: LoraConfig = LoraConfig()
    log_every: int = Field(1, ge=1)
    """steps between lines of metrics.jsonl; a step with an evaluation always has a line"""
    eval_every: int = Field(0, ge=0)
    """steps between evaluations; 0: evaluate at the end only"""
    save_every: int = Field(0, ge=0)
    """steps between checkpoints; 0: one checkpoint every 15 minutes, and checkpoints of at most 1 GiB also about ten
    times per stage"""
    keep_checkpoints: int = Field(2, ge=1)
    """number of newest checkpoints to retain; a finished stage needs none"""
    eval_examples: int = Field(256, ge=1)
    """held-out examples per evaluation"""
    export: Literal["last", "best"] = "last"
    """model to export: the last one, or the best of the evaluations (eval_every) by held-out loss (sft, dpo), accuracy
    (reward), or the judge's score (ppo; without a judge, the reward within ppo.kl_budget)"""

    @property
    def selects_best(self) -> bool:
        """Whether the stage may export an earlier step than its last one, so that evaluations change its result."""
        return self.export == "best"


class SftSection(StageSection):
    packing: bool = True
    """put conversations into one row without padding; attention does not cross conversations"""
    loss_on: Literal["assistant", "all"] = "assistant"
    """tokens that the loss includes"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout during training, if the model has dropout layers"""


class DpoSection(StageSection):
    lr: float = Field(1e-6, ge=0)
    """peak learning rate"""
    warmup: float = Field(0.1, ge=0, le=1)
    """share of the steps in which the learning rate rises from 0 to lr"""
    loss: Literal["sigmoid", "robust", "apo_zero", "ipo", "length_normalized", "simpo", "orpo", "kto"] = "sigmoid"
    """sigmoid: negative log-likelihood of the preferences (Rafailov et al., 2023); robust: sigmoid with a correction
    for a share label_smoothing of wrong labels, so that its expected value is the loss of the correct labels (Chowdhury
    et al., 2024); apo_zero: one term raises the chosen answer, the other lowers the rejected answer, both relative to
    the reference (D'Oosterlinck et al., 2024); ipo: squared distance to a fixed margin, which bounds the log-ratios
    even if no labels contradict each other (Azar et al., 2023); length_normalized: sigmoid of log-ratios per token
    (Lambert et al., 2024); simpo: log-probabilities per token and a target margin (Meng et al., 2024); orpo: SFT loss
    and odds ratio (Hong et al., 2024); kto: answers labelled desirable or not, without pairs (Ethayarajh et al., 2024);
    simpo and orpo have no reference"""
    beta: float = Field(0.1, gt=0)
    """sigmoid, robust, apo_zero, length_normalized, kto: strength of the pull towards the reference (the model that DPO
    starts from), reward = beta * log-ratio to the reference; ipo: beta = 1 / (2 * margin), where margin is the target
    difference of the log-ratios; simpo: reward = beta * log-probability per token; orpo: weight of the odds ratio"""
    margin: float = Field(0.0, ge=0)
    """simpo: the reward difference that a pair should exceed (gamma)"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """assumed share of pairs with the wrong label; sigmoid and length_normalized: conservative DPO (Mitchell, 2023);
    robust: robust DPO; not for other losses"""
    sft_coef: float = Field(0.0, ge=0)
    """weight of an added SFT loss: the cross-entropy per token of the chosen answer, which prevents good answers from
    becoming unlikely (Pang et al., 2024)"""

    undesirable_weight: float = Field(1.0, gt=0)
    """kto: weight of an answer with label=false, relative to an answer with label=true"""

    @property
    def reads_pairs(self) -> bool:
        """Whether the stage learns from pairs; otherwise from answers with labels."""
        return self.loss != "kto"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model that the stage starts from."""
        return self.loss not in ("simpo", "orpo")


class RewardSection(StageSection):
    init: Literal["auto", "sft", "base"] = "auto"
    """initial weights: sft, the SFT model of this run; base, the base model; auto: sft, or base if reward_model is set
    or the run has no SFT model"""
    centering: float = Field(0.01, ge=0)
    """coefficient of (chosen + rejected)^2, a term that pulls scores towards 0"""
    use_margin: bool = False
    """subtract the margin column of the data from the score difference"""


GuardAction = Literal["off", "warn", "stop", "rollback"]

ROLE_ENGINES = ("actor_engine", "critic_engine", "reference_engine", "reward_engine")
"""Keys of PPO that change the engine settings of one model."""


class PpoSection(StageSection):
    kl_coef: float = Field(0.05, ge=0)
    """weight of the KL divergence per token to the reference"""
    guard: Annotated[GuardAction, BeforeValidator(lambda value: "off" if value is False else value)] = "stop"
    """reaction of the training guard to a sign that PPO has gone wrong (docs/guides/watch_a_run.md lists the signs).
    off: no checks; warn: print the sign and continue; stop: end the stage and export the best step; rollback: restart
    from the best step with 0.3 times the learning rates, at most twice, then stop"""
    kl_budget: float = Field(10.0, gt=0)
    """without a judge: largest KL to the reference, in nats per answer, of a step that export=best and the guard may
    select; among these steps, the held-out reward decides"""
    kl_in: Literal["reward", "loss"] | None = None
    """where the KL penalty applies: reward, subtracted from the score (Ziegler et al., 2019), or loss, a term with its
    own gradient (Shao et al., 2024); null: loss for grpo, reinforce_baseline, online_dpo and distill, otherwise reward
    """
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] | None = None
    """KL estimator per token (Schulman, 2020): k1, the log-ratio; k2, half its square; k3, exp(-log-ratio) - 1 +
    log-ratio; k3_weighted, k3 times the policy ratio, only in the loss (DeepSeek-V3.2; DeepSeek-AI, 2025); null: k1 if
    kl_in is reward, k3 if kl_in is loss"""
    reference: bool | None = None
    """compute log-probabilities under the reference: the model that PPO starts from, or the teacher; null: true if
    kl_coef is above 0, the guard is on, or advantage is online_dpo or distill. With kl_coef=0, only online_dpo and
    distill train with the reference; for other estimators it serves the metric kl"""
    kl_target: float | None = Field(None, gt=0)
    """target KL in nats per sequence; kl_coef adapts to it (Ziegler et al., 2019); null: kl_coef is constant"""
    kl_horizon: int = Field(10000, ge=1)
    """number of sequences over which kl_coef adapts to kl_target"""
    update_epochs: int = Field(4, ge=1)
    """training passes over each rollout"""
    minibatches: int = Field(1, ge=1)
    """optimizer steps per pass over a rollout"""
    shared_forward: bool | None = None
    """with minibatches=1, the first update reuses the forward passes that scored the rollout, which holds their
    activations in memory until then; null: true if the predicted memory permits it"""
    reward_model: bool = True
    """score answers with a reward model; false: score with reward_function only, and skip the reward stage"""
    reward_function: FilePath | None = None
    """FILE.py:NAME, a function (answer, row) -> number, or a dictionary of numbers, that scores answers; with a reward
    model, the scores are added. A generator function talks with the policy for several turns"""
    reward_weights: dict[str, float] = {}
    """weights of the rewards in the score, {name: weight}. The name model is the reward model; other names are those
    that reward_function returns in a dictionary; a reward without a weight has the weight 1"""
    reward_ensemble: list[FilePath] = []
    """folders of further reward models (model or stage folders); their scores are scaled to the mean and standard
    deviation of the first reward model"""
    ensemble_score: Literal["mean", "worst"] = "mean"
    """with reward_ensemble: the score of an answer is the mean of the reward models' scores, or the lowest (Coste et
    al., 2023)"""
    reward_threads: int = Field(1, ge=1)
    """concurrent calls of reward_function on a rank, for a function that waits for a service or a sandbox; above 1,
    calls run in threads"""
    loss: Literal["clip", "cispo"] = "clip"
    """loss of the policy: clip, the clipped surrogate of PPO (Schulman et al., 2017); cispo, the log-probability times
    the advantage and the clipped ratio, which is a constant weight, so every token keeps a gradient (MiniMax, 2025;
    ppo=cispo)"""
    clip: float = Field(0.2, gt=0)
    """the policy ratio is clipped to 1 - clip .. 1 + clip"""
    clip_high: float | None = Field(None, gt=0)
    """the policy ratio is clipped to 1 - clip .. 1 + clip_high (Yu et al., 2025); null: the value of clip"""
    ratio: Literal["token", "sequence"] = "token"
    """policy ratio: token, of each token; sequence, the geometric mean over the tokens of an answer, with equal weight
    for each answer (GSPO; Zheng et al., 2025)"""
    dual_clip: float | None = Field(3.0, gt=1)
    """upper bound on the ratio if the advantage is negative (Ye et al., 2020); null: no bound"""
    value_clip: float | None = Field(0.2, gt=0)
    """largest change of a value from its old value in the value loss; null: no clipping"""
    critic_lr: float = Field(1e-5, ge=0)
    """peak learning rate of the critic"""
    critic_warmup: int = Field(0, ge=0)
    """number of rollouts at the start in which only the critic is trained"""
    advantage: Literal["gae", "rloo", "grpo", "reinforce", "reinforce_baseline", "online_dpo", "distill"] = "gae"
    """baseline of the advantages: gae, a critic; rloo and grpo, the other answers to the same prompt, without a critic;
    reinforce, all answers of the rollout (REINFORCE++; Hu, 2025); reinforce_baseline, the other answers to the same
    prompt, whitened over the rollout; online_dpo, the gradient of DPO on the best and the worst answer to each prompt
    (Guo et al., 2024); distill, the log-ratio of the teacher and the policy at each token, without a reward
    (method=distill)"""
    pair_beta: float = Field(0.1, gt=0)
    """online_dpo: strength of the pull towards the reference, as dpo.beta for loss=sigmoid"""
    divide_by_std: bool = True
    """grpo: divide advantages by the standard deviation over the answers to a prompt; false: do not divide (Dr. GRPO;
    Liu et al., 2025)"""
    samples: int = Field(1, ge=1)
    """answers per prompt; a rollout has ppo.batch_size * samples answers"""
    resample: int = Field(0, ge=0)
    """largest number of rounds per rollout that replace the prompts whose answers all have the same score by new
    prompts (dynamic sampling of DAPO; Yu et al., 2025); 0: none; not for gae, reinforce and distill"""
    gamma: float = Field(1.0, gt=0, le=1)
    """discount per token"""
    lam: float = Field(0.95, ge=0, le=1)
    """lambda of GAE"""
    whiten_advantages: bool = True
    """normalize the advantages of gae, reinforce and reinforce_baseline to mean 0 and variance 1 over the global batch
    """
    missing_end_penalty: float = Field(1.0, ge=0)
    """subtracted from the score of an answer that was cut off at rollout.max_new_tokens, in standard deviations of the
    reward model's scores (without a reward model: in units of the score)"""
    unfinished: Literal["penalize", "mask"] = "penalize"
    """answers that were cut off at rollout.max_new_tokens. penalize: subtract missing_end_penalty from the score; mask:
    leave them out of the updates, without a penalty (overlong filtering of DAPO; Yu et al., 2025)"""
    length_penalty: float = Field(0.0, ge=0)
    """subtracted from the score for each token of an answer beyond length_free"""
    length_free: int = Field(0, ge=0)
    """tokens in an answer that length_penalty does not count; a value close to rollout.max_new_tokens gives the soft
    limit of DAPO (Yu et al., 2025)"""
    score_clip: float | None = Field(None, gt=0)
    """scores are clipped to the range -score_clip .. score_clip; null: no clipping"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    ptx_coef: float = Field(0.0, ge=0)
    """weight of the SFT loss that is added to the policy loss (PTX)"""
    ema: float | None = Field(None, gt=0, lt=1)
    """decay of the moving average of the actor's weights (with bias correction), which is then the evaluated and
    exported model; null: no average"""
    importance_cap: float | None = Field(None, gt=0)
    """largest importance weight (usually 2). The weight of a token's policy loss is the ratio of the trainer's to the
    generator's probability; null: no weight"""
    importance_weights: Literal["token", "sequence", "token_mask", "sequence_mask"] = "token"
    """with importance_cap: token and sequence truncate the ratio of a token, or of an answer, to the cap; token_mask
    and sequence_mask leave out tokens, or answers, with a ratio above the cap"""
    keep_answers: int = Field(8, ge=0)
    """number of answers of each rollout to write to rollouts.jsonl, with scores and rewards"""
    keep_tokens: bool = False
    """also write the log-probabilities, value, reward and advantage of each token to rollouts.jsonl"""
    ratio_tolerance: float | None = Field(None, gt=0)
    """PPO stops if the ratio deviates from 1 in the first minibatch by more than this value, on average; null: the
    precision determines the value"""
    actor_engine: dict[str, Any] = {}
    """engine keys for the actor only"""
    critic_engine: dict[str, Any] = {}
    """engine keys for the critic only"""
    reference_engine: dict[str, Any] = {}
    """engine keys for the reference only"""
    reward_engine: dict[str, Any] = {}
    """engine keys for the reward model only"""

    @property
    def selects_best(self) -> bool:
        """Whether `export` or the guard may select an earlier step than the last one."""
        return self.export == "best" or self.guard in ("stop", "rollback")

    @property
    def compares_answers(self) -> bool:
        """Whether the estimator compares the answers to one prompt, and gives all tokens of an answer one advantage."""
        return self.advantage not in ("gae", "reinforce", "distill")

    @property
    def kl_counts_in(self) -> Literal["reward", "loss"]:
        """`kl_in`, or the usual choice for `advantage`."""
        in_loss = ("grpo", "reinforce_baseline", "online_dpo", "distill")
        return self.kl_in or ("loss" if self.advantage in in_loss else "reward")

    @property
    def needs_reference(self) -> bool:
        """`reference`, or whether the KL counts (`kl_coef` above 0), the guard watches it or the estimator needs it."""
        if self.reference is not None:
            return self.reference
        return self.kl_coef > 0 or self.guard != "off" or self.advantage in ("online_dpo", "distill")
