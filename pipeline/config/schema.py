"""The configuration keys: types, bounds, defaults and descriptions.

Every default is defined here and nowhere else. Hydra composes `conf/` into a dictionary, `validate`
(in `check.py`) turns the dictionary into a `RunConfig`. Only the entry points of stages read it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from pipeline.config.stage_sections import DpoSection, FilePath, PpoSection, RewardSection, Section, SftSection


def _deepspeed_file(value: Any) -> Any:
    """Return the content of a DeepSpeed file, which the run stores and reuses on restart. Raises ValueError."""
    if value is None:
        return None
    from engine import deepspeed_json  # a late import: it imports torch

    return deepspeed_json.load(value)


DeepSpeedFile = Annotated[dict[str, Any] | None, BeforeValidator(_deepspeed_file)]


class ModelConfig(Section):
    name: str
    """short name, used in run names and tables"""
    hub: str | None = None
    """hub id, used when `path` is not given"""
    path: FilePath | None = None
    """local folder in Hugging Face format (safetensors)"""
    weights: Literal["pretrained", "random"] = "pretrained"
    """random builds `architecture` with random weights and never contacts the hub"""
    architecture: dict[str, Any] | None = None
    """model_type and the fields of its transformers configuration, for weights=random"""
    tokenizer: str | None = None
    """tokenizer folder or hub id; `train` trains one on the run's data"""
    chat_template: FilePath | None = None
    """file with a Jinja chat template, instead of the tokenizer's own"""
    thinking: bool = False
    """the model writes its reasoning before the answer: prompts end where the reasoning (`<think>`) begins, and SFT
    trains on the reasoning in the data; needs a chat template that writes or opens a block of reasoning"""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """attention implementation of transformers; auto: sdpa if the family supports it, else eager"""
    fused_kernels: Literal["auto", "liger", "none"] = "auto"
    """norm, rotary embedding and gate, in training and generation. liger: those of Liger Kernel; none: those of
    transformers; auto: liger on GPUs if liger-kernel is installed (`pip install '.[gpu]'`), supports the model's family
    and Triton can compile kernels, otherwise none"""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: freeze the model's linear layers in 4 bits and train adapters (QLoRA); needs `pip install '.[quantize]'` and
    adapters in every stage"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    tensor_plan: dict[str, str] | None = None
    """how engine.tensor_parallel splits modules, {pattern: style}; default: the plan that comes with the model"""

    @property
    def trains_tokenizer(self) -> bool:
        """Whether the run trains a tokenizer on its data."""
        return self.tokenizer == "train" or (self.tokenizer is None and self.weights == "random")


class RecordedSize(Section):
    rows: int = Field(ge=1)
    """rows of the training split"""
    prompt_tokens: float = Field(gt=0)
    """mean tokens of a prompt, with the chat template"""
    answer_tokens: float = Field(gt=0)
    """mean tokens of an answer"""


class SourceConfig(Section):
    path: FilePath | None = None
    """local file or folder: jsonl, json, csv, tsv (also compressed), parquet, arrow"""
    eval_path: FilePath | None = None
    """local file or folder of held-out data; without it, eval_fraction of the prompts of `path` are held out"""
    hub: str | None = None
    """data set id on the hub"""
    subset: str | None = None
    """configuration name of the hub set"""
    split: str = "train"
    """split of the hub set to train on"""
    eval_split: str | None = None
    """held-out split of the hub set; without it, eval_fraction of the prompts of `split` are held out"""
    builtin: Literal["demo", "tasks"] | None = None
    """rows that are generated when a stage starts: demo, conversations and preferences of zerochat; tasks, questions
    and answers of reasoning-gym (data.task)"""
    weight: float | None = Field(None, gt=0)
    """share of this source in the mix, relative to the weights of the other sources; null (default): use every row of
    every source"""
    stages: list[Literal["sft", "reward", "ppo"]] = ["sft", "reward", "ppo"]
    """stages that this source serves; dpo reads the pairs of the sources that serve reward"""
    size: RecordedSize | None = None
    """recorded size of the training split, which stage=plan reads instead of a hub set"""
    columns: dict[str, str] = {}
    """columns to rename: {name in the file: name that zerochat expects}"""


class TaskConfig(Section):
    name: str = "spell_backward"
    """name of a task of reasoning-gym"""
    options: dict[str, Any] = {}
    """options of the task, {name: value}"""
    rows: int = Field(8000, ge=16, le=1_000_000)
    """number of generated training rows, before repeated questions are removed"""
    held_out: int = Field(256, ge=1, le=100_000)
    """number of generated held-out questions"""


class DataConfig(Section):
    name: str
    """short name, used in run names and tables"""
    path: FilePath | None = None
    """one local file or folder, instead of `sources`"""
    sources: list[SourceConfig] = []
    """where the data comes from"""
    eval_fraction: float = Field(0.05, gt=0, lt=1)
    """share of prompts to hold out if a source has no held-out split"""
    stage_shares: dict[Literal["sft", "reward", "ppo"], float] = {"sft": 0.2, "reward": 0.4, "ppo": 0.4}
    """shares of the prompts if one source serves several stages of a run: no two stages read the same prompt, and dpo
    reads the shares of reward and ppo; with the default, a stage that runs alone reads all rows"""
    bad_row_limit: float = Field(0.05, ge=0, le=1)
    """largest share of unusable rows; a file with more is rejected"""
    demo_examples: int = Field(12000, ge=200)
    """number of generated examples (data=demo)"""
    task: TaskConfig = TaskConfig()


class EngineSettings(Section):
    auto: bool = False
    """before each stage, choose the fastest settings that fit into memory: zero_stage, both offload tiers,
    activation_checkpointing and the micro-batch"""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """what is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters"""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """compute precision, with fp32 master weights; auto is bf16 on a GPU (fp16 below compute capability 8.0) and fp32
    on a CPU"""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """where fp32 master weights and moments are stored and updated: none (on the device), cpu (in host memory), nvme
    (in files)"""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """where parameter shards are stored between uses: none (on the device), cpu (in host memory), nvme (in files, needs
    zero_stage=3)"""
    offload_ratio: float = Field(1.0, ge=0, le=1)
    """share of the parameters whose optimizer states are offloaded; the device updates the other parameters"""
    nvme_path: FilePath | None = None
    """folder for the offload files of this run (nvme); default: the temporary folder"""
    sub_group_size: int = Field(2**23, ge=1024)
    """number of parameters that an offloaded optimizer updates at a time; a larger value needs more host memory with
    nvme"""
    activation_checkpointing: bool = False
    """recompute activations in the backward pass: about a third more compute, far less memory"""
    compile_blocks: bool = False
    """torch.compile each transformer block"""
    shard_ranks: int | None = Field(None, ge=1)
    """number of adjacent ranks that shard one copy of the model; each such group holds a replica (HSDP); null: all
    ranks shard one copy"""
    compress: Literal["none", "gather8", "reduce8", "both"] = "none"
    """communicate in 8 bits (zero_stage 1 or higher): gather8 for parameter gathers, reduce8 for gradient reductions,
    or both"""
    states: Literal["fp32", "bf16"] = "fp32"
    """precision of AdamW's states: fp32 master weights and moments (12 bytes per parameter), or bf16 with stochastic
    rounding (6 bytes per parameter)"""
    tensor_parallel: int = Field(1, ge=1)
    """number of adjacent ranks that split each weight matrix and process the same data"""
    sequence_parallel: int = Field(1, ge=1)
    """number of adjacent ranks that split the tokens of each packed row, for long conversations"""
    pipeline_parallel: int = Field(1, ge=1)
    """number of pipeline ranks, each with consecutive blocks of the model; only for stage=sft"""
    loss_scale_power: int = Field(16, ge=0, le=32)
    """fp16: the initial loss scale is 2 to this power"""
    loss_scale_window: int = Field(1000, ge=1)
    """fp16: steps without overflow before the loss scale doubles"""
    hang_seconds: float | None = Field(None, ge=1)
    """a stage ends with exit status 5 if no rank makes progress for this number of seconds, while it takes steps. The
    value must exceed the time of a micro-batch, a decode step and an optimizer step; null: 10 times the slowest step or
    phase so far, at least 300 (docs/guides/resuming.md#when-a-run-hangs)"""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """what happens before a stage whose predicted memory exceeds the GPU: refuse ends the run, warn prints the
    prediction and starts the stage"""
    deepspeed: DeepSpeedFile = None
    """DeepSpeed configuration (JSON file); its values override the engine keys, see docs/reference/deepspeed.md"""

    def changed_by(self, changes: Mapping[str, Any]) -> "EngineSettings":
        """Return these settings with the changes of one of PPO's models (`ppo.actor_engine` and similar keys)."""
        return EngineSettings.model_validate({**self.model_dump(), **changes})

    def engine_fields(self) -> dict[str, Any]:
        """Return the settings as fields of `engine.EngineConfig`, without the DeepSpeed file. `dtype` may be "auto"."""
        from engine import LossScale  # a late import: it imports torch

        own = {"auto", "deepspeed", "hang_seconds", "loss_scale_power", "loss_scale_window", "memory_check"}
        fields = self.model_dump(exclude=own)
        return {**fields, "loss_scale": LossScale(self.loss_scale_power, self.loss_scale_window)}

    def deepspeed_file(self, *, trains: bool) -> Mapping[str, Any]:
        """Return the DeepSpeed file for a model; without `optimizer` and `scheduler` if the model is frozen."""
        frozen = () if trains else ("optimizer", "scheduler")
        return {key: value for key, value in (self.deepspeed or {}).items() if key not in frozen}


class RolloutSection(Section):
    generator: Literal["engine", "vllm"] = "engine"
    """what generates the answers, in the process of each rank. engine: the built-in generator; vllm: vLLM, with a paged
    cache for long answers (docs/reference/generation.md#vllm); needs `pip install '.[vllm]'`"""
    temperature: float = Field(1.0, ge=1e-5)
    """sampling temperature; training divides logits by the same value"""
    top_k: int = Field(0, ge=0)
    """sample from the k likeliest tokens; 0: all tokens, as PPO assumes"""
    top_p: float = Field(1.0, ge=1e-5, le=1)
    """sample from the smallest set of tokens with this total probability; PPO assumes 1"""
    min_p: float = Field(0.0, ge=0, le=1)
    """exclude tokens with less than this share of the highest probability; PPO assumes 0"""
    repetition_penalty: float = Field(1.0, ge=1e-5, le=1e5)
    """above 1: tokens that occur in the prompt or answer become less likely; PPO assumes 1"""
    min_new_tokens: int = Field(0, ge=0)
    """smallest number of tokens in an answer; PPO assumes 0"""
    max_new_tokens: int = Field(256, ge=1)
    """largest number of tokens in an answer, including its end token"""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """strings that end an answer, in addition to the end token: rollout.stop='["Human:"]'"""
    max_prompt_tokens: int = Field(512, ge=1)
    """largest number of tokens in a prompt; longer prompts are dropped and counted"""
    batch_size: int | None = Field(None, ge=1)
    """largest number of sequences that a rank decodes at a time; null: on a GPU as many of the rank's sequences as the
    predicted memory of the stage permits (at least 64), on a CPU 64"""
    cache_bytes: int | None = Field(None, ge=1)
    """largest size of the key-value cache of a rank, in bytes; a smaller cache decodes fewer sequences at a time; null:
    half of the free memory, or with vllm as large as useful and possible"""
    tensor_parallel: int = Field(1, ge=1)
    """number of adjacent ranks that split the generator's weight matrices and answer the same prompts"""
    stream: bool = False
    """load the generator's blocks to the device one at a time, for models that do not fit into device memory"""
    keep: bool = True
    """retain the generator's weights and cache between rollouts; false: release them"""
    park_optimizer: bool = False
    """move optimizer states to host memory during generation (GPU)"""
    parity_check_every: int = Field(50, ge=0)
    """compare the generator with the model (parity check) in the first four generations and in every N-th one; each
    rollout and each evaluation is a generation; 0: never"""


class EvaluationSection(Section):
    prompts: int = Field(128, ge=1)
    """largest number of held-out prompts that the base, SFT and PPO (or DPO) models answer; each conversation provides
    one prompt"""
    temperatures: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = Field(None, min_length=1)
    """sampling temperatures of the held-out answers, 0 for greedy decoding; null: rollout.temperature and 0"""
    best_of: int = Field(4, ge=1)
    """the report compares PPO with the best of this number of SFT answers per prompt, by the score with penalties;
    the answers are sampled at the first of temperatures that is not 0; 1: no such comparison"""
    table_rows: int = Field(16, ge=1)
    """number of held-out prompts that the report shows"""
    judge: FilePath | None = None
    """FILE.py:NAME, a function (answer, row) -> number from 0 to 1 that grades the held-out answers: the gold score;
    not used in training"""
    pair_judge: FilePath | None = None
    """FILE.py:NAME, a function (first answer, second answer, row) -> number from 0 (the second is better) to 1 (the
    first is better), or None without a verdict; compares each held-out answer after PPO or DPO with the SFT answer, in
    both orders"""
    judge_threads: int = Field(1, ge=1)
    """concurrent calls of judge and of pair_judge on a rank, see ppo.reward_threads"""


class TrackingSection(Section):
    kind: Literal["wandb", "tensorboard", "both", "none"] = "wandb"
    """where metrics go, in addition to metrics.jsonl; tensorboard writes RUN/tensorboard"""
    project: str = "zerochat"
    """wandb project"""
    entity: str | None = None
    """wandb entity"""


class ProfileSection(Section):
    steps: Annotated[list[Annotated[int, Field(ge=1)]], AfterValidator(sorted)] | None = Field(
        None, min_length=2, max_length=2
    )
    """first and last step of each stage to record with torch.profiler, into the stage's folder: profile.steps=[5,8]"""
    ranks: Literal["first", "all"] = "first"
    """ranks that profile.steps records"""


GpuName = Literal[
    "b200", "h200", "h100", "a100", "a100-40gb", "l40s", "a6000", "rtx4090", "rtx3090", "a10g", "l4", "v100", "t4"
]  # fmt: skip


class PlanSection(Section):
    device: Annotated[GpuName | None, BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name)] = (
        None
    )
    """stage=plan: GPU to plan for, by its data sheet; null: measure this machine"""
    ranks: int = Field(1, ge=1)
    """stage=plan: number of GPUs of the type plan.device; a plan for this machine reads `ranks` instead"""
    price_per_gpu_hour: float | None = Field(None, ge=0)
    """stage=plan: price of one GPU for one hour, in any currency"""


class RunConfig(Section):
    name: str | None = None
    """run name; default: made from model, data and time"""
    run_dir: FilePath | None = None
    """run folder, instead of runs/<name>"""
    stage: Literal["all", "sft", "reward", "dpo", "ppo", "plan"] = "all"
    """stage to run; all: every stage; plan: only print the hours and the memory that all stages need, and what they
    cost"""
    method: Literal["ppo", "dpo", "distill"] = "ppo"
    """stages of stage=all: ppo runs SFT, a reward model and PPO; dpo runs SFT and direct preference optimization;
    distill runs SFT and on-policy distillation from `teacher` (short form of ppo=distill)"""
    seed: int = Field(1, ge=0, lt=2**32)
    """seed of all random numbers"""
    ranks: int | None = Field(None, ge=1)
    """processes on this machine; default: one per GPU, or one on a CPU"""
    restarts: int = Field(0, ge=0, le=1000)
    """number of times that a stage starts again from its newest checkpoint after a crash, a lost rank or a hang"""
    actor: FilePath | None = None
    """model folder (or stage folder) that PPO or DPO starts from; default: the sft stage of this run"""
    reward_path: FilePath | None = None
    """model folder (or stage folder) of the reward model; default: the reward stage of this run (short form:
    reward=PATH)"""
    teacher: FilePath | None = None
    """model folder (or stage folder) of the teacher, for method=distill; needs the vocabulary of the student"""
    debug: bool = False
    """show tracebacks"""
    model: ModelConfig
    reward_model: ModelConfig | None = None
    """base of the reward model and critic; default: the base model of the policy"""
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

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults as a nested dictionary. The required keys `model.name` and `data.name` are missing."""
        required: dict[str, Any] = {"model": ModelConfig, "data": DataConfig}
        sections = {key: section.model_construct() for key, section in required.items()}
        return cls.model_construct(**sections).model_dump()

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures of evaluations; by default that of rollouts and 0 (greedy decoding)."""
        return tuple(dict.fromkeys(self.evaluation.temperatures or (self.rollout.temperature, 0.0)))
