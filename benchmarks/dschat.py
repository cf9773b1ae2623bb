"""The work of DeepSpeed-Chat's published run: OPT-1.3B actor, OPT-350M critic and reward model, 256 + 256 tokens.

    opt-1.3b    the full size, on a GPU
    opt-125m    on a CPU: an OPT-125M actor, a critic of about a quarter of its size, 64 + 64 tokens

Weights and tokens are random, lengths are fixed, and a step has one epoch and one minibatch. The work of a step does
not depend on what the model learns.

Utilisation = model FLOPs / seconds / measured bf16 product rate of the device. A forward costs 2 P + 2 L D T FLOPs per
token (P parameters, L layers, D hidden size, T sequence length, causal attention). Training costs three forwards. Each
answer counts one forward for generation, one each for old log-probabilities, reference log-probabilities, values and
score, and three each for actor and critic (Chowdhery et al., 2022, appendix B).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.gpu.ceilings import matmul_rate
from benchmarks.gpu.setting import OPT_1_3B, TINY, Setting
from benchmarks.gpu.training import fill
from benchmarks.machine import quiet_figures
from benchmarks.measure import medians_by_name
from benchmarks.record import Result
from engine import Engine, EngineConfig, OptimizerConfig, Sampling
from engine.config import Precision
from engine.parallel import dist
from pipeline.data.batch import Documents
from pipeline.models.checks import verify
from pipeline.models.modules import Policy, Scorer
from step3_ppo.advantages import gae, kl_k1, shaped_rewards, whiten
from step3_ppo.loss import policy_loss, value_loss

CASES = ("opt-1.3b",)
OPT_350M = OPT_1_3B | {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "ffn_dim": 4096,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
OPT_125M = OPT_1_3B | {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "word_embed_proj_dim": 768,
}
SMALL_CRITIC = OPT_125M | {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "ffn_dim": 1536,
    "word_embed_proj_dim": 192,
    "do_layer_norm_before": False,
}
PUBLISHED_TOKENS = 135.3e6
PUBLISHED_HOURS = {"one_a100_80g": 11.7, "eight_a100_80g": 1.4}  # DeepSpeed-Chat's README, table 1
OPTIMIZER = OptimizerConfig(lr=1e-6, schedule="constant")


@dataclass(frozen=True)
class Size:
    """Shapes of actor and critic, sequences per step, tokens per prompt and per answer, sequences per micro-batch."""

    name: str
    actor: dict[str, Any]
    critic: dict[str, Any]
    batch: int
    length: int
    micro: int
    dtype: Precision = "bf16"


FULL_SIZE = Size("opt-1.3b", OPT_1_3B, OPT_350M, 256, 256, 32)
CPU_SIZE = Size("opt-125m", OPT_125M, SMALL_CRITIC, 16, 64, 16)
TEST_SIZE = Size("tiny", TINY, TINY, 4, 8, 2, "fp32")


@dataclass(frozen=True)
class PackedBatch:
    """One row of several sequences (prompt and response) without padding.

    indices: the sequences of the row. scored: positions of the response tokens. ends: position of each last token.
    """

    indices: slice
    input_ids: Tensor
    scored: Tensor
    ends: Tensor
    documents: Documents


@dataclass(frozen=True)
class Chat:
    """The four engines and the size of the work."""

    actor: Engine
    reference: Engine
    critic: Engine
    reward: Engine
    size: Size


def run(cases: Sequence[str], rounds: int) -> list[Result]:
    """Return tokens per second, of prompts and answers, over complete steps."""
    has_gpu = torch.cuda.is_available()
    setting = Setting(dist.world().device, tiny=not has_gpu)
    chat = build(FULL_SIZE if has_gpu else CPU_SIZE)
    seconds = [step(chat, setting, number) for number in range(rounds + 1)][1:]
    return [_result(chat, setting, medians_by_name(seconds)) for _ in cases]


def build(size: Size) -> Chat:
    """Return the four engines, with random weights."""
    engines = (
        _engine(size, scores=False, learns=True),
        _engine(size, scores=False, learns=False),
        _engine(size, scores=True, learns=True),
        _engine(size, scores=True, learns=False),
    )
    for engine in engines:
        assert verify(engine, max_length=2 * size.length)
    return Chat(*engines, size)


def _engine(size: Size, *, scores: bool, learns: bool) -> Engine:
    config = AutoConfig.for_model("opt", **(size.critic if scores else size.actor), num_labels=1)
    auto: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return Engine(
        Scorer(model) if scores else Policy(model),
        EngineConfig(dtype=size.dtype),
        optimizer=OPTIMIZER if learns else None,
        fill=fill,
        rollout_path="lm" if learns and not scores else None,
    )


def step(chat: Chat, setting: Setting, number: int) -> dict[str, float]:
    """Run one PPO step; return the seconds of each phase."""
    vocabulary, size = chat.size.actor["vocab_size"], chat.size
    source = torch.Generator().manual_seed(number)
    prompts = torch.randint(10, vocabulary, (size.batch, size.length), generator=source)
    seconds: dict[str, float] = {}

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        setting.wait()
        start = perf_counter()
        result = work()
        setting.wait()
        seconds[phase] = perf_counter() - start
        return result

    answers = timed("generate", lambda: _generate(chat, prompts.tolist(), number))
    batches = _pack(chat, torch.cat([prompts, answers], dim=1).to(setting.device))
    old, reference, values, scores = timed("score", lambda: _score(chat, batches))
    mask = torch.ones_like(old, dtype=torch.bool)
    advantages, returns = gae(
        shaped_rewards(scores, kl_k1(old, reference), mask, kl_coef=0.1), values, mask, gamma=1.0, lam=0.95
    )
    advantages, count = whiten(advantages, mask), float(mask.sum())

    def actor_loss(module: nn.Module, batch: PackedBatch) -> Any:
        logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
        flat = [table[batch.indices].flatten() for table in (old, advantages)]
        return policy_loss(logprobs, *flat, clip=0.2, dual_clip=None)

    def critic_loss(module: nn.Module, batch: PackedBatch) -> Any:
        flat = [table[batch.indices].flatten() for table in (values, returns)]
        return value_loss(_values(module, batch), *flat, clip=0.2)

    timed("train_actor", lambda: chat.actor.update(batches, actor_loss, count))
    timed("train_critic", lambda: chat.critic.update(batches, critic_loss, count))
    return seconds


def _generate(chat: Chat, prompts: list[list[int]], seed: int) -> Tensor:
    # Without end ids every answer has its full length.
    sampling = Sampling(max_new_tokens=chat.size.length, end_ids=(), seed=seed)
    with chat.actor.generating() as generator:
        answers = generator.generate(prompts, sampling, sample_seeds=list(range(len(prompts))), batch_size=len(prompts))
    return torch.tensor([answer.token_ids for answer in answers])


def _pack(chat: Chat, ids: Tensor) -> list[PackedBatch]:
    length, response = ids.shape[1], torch.arange(chat.size.length, ids.shape[1], device=ids.device)
    batches = []
    for first in range(0, chat.size.batch, chat.size.micro):
        indices = slice(first, first + chat.size.micro)
        local_ids = ids[indices]
        starts = length * torch.arange(len(local_ids), device=ids.device)
        scored, documents = (starts[:, None] + response).flatten(), Documents((length,) * len(local_ids))
        batches.append(PackedBatch(indices, local_ids.view(1, -1), scored, starts + length - 1, documents))
    return batches


def _score(chat: Chat, batches: Sequence[PackedBatch]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return old log-probabilities, reference log-probabilities and values, (B, R) each, and scores (B,)."""
    tables = []
    for engine in (chat.actor, chat.reference):
        with engine.scoring() as module:
            logprobs = [module(b.input_ids, b.scored, documents=b.documents)[0] for b in batches]
        tables.append(torch.cat(logprobs).view(chat.size.batch, -1))
    with chat.critic.scoring() as module:
        values = torch.cat([_values(module, b) for b in batches]).view(chat.size.batch, -1)
    with chat.reward.scoring() as module:
        scores = torch.cat([module(b.input_ids, documents=b.documents)[0].index_select(0, b.ends) for b in batches])
    return tables[0], tables[1], values, scores


def _values(module: nn.Module, batch: PackedBatch) -> Tensor:
    values: Tensor = module(batch.input_ids, documents=batch.documents).flatten().index_select(0, batch.scored - 1)
    return values


def _result(chat: Chat, setting: Setting, seconds_by_phase: dict[str, float]) -> Result:
    size = chat.size
    tokens, seconds = 2 * size.length * size.batch, sum(seconds_by_phase.values())
    large, small = (_forward_flops(engine, 2 * size.length) for engine in (chat.actor, chat.critic))
    flops = {"generate": large, "score": 2 * large + 2 * small, "train_actor": 3 * large, "train_critic": 3 * small}
    peak = _product_rate(setting)
    rate, is_full_size = tokens / seconds, size is FULL_SIZE
    return Result(
        bench="dschat",
        case=size.name,
        ours=rate,
        unit="tokens/s",
        lower_is_better=False,
        peer=PUBLISHED_TOKENS / PUBLISHED_HOURS["one_a100_80g"] / 3600 if is_full_size else None,
        detail={
            "work": f"{size.batch} x ({size.length} + {size.length}) tokens per step, one epoch, {size.dtype}",
            "scaled": "no" if is_full_size else "smaller models: the hours are not those of the published models",
            "share_of_generation": seconds_by_phase["generate"] / seconds,
            "utilisation": tokens * sum(flops.values()) / seconds / peak,
            "utilisation_formula": "tokens x (2 P + 2 L D T) x (1 generate, 4 score, 3 + 3 train) / s / product rate",
            "hours_of_135_m_tokens": PUBLISHED_TOKENS / rate / 3600,
            **{f"published_hours_{name}": hours for name, hours in PUBLISHED_HOURS.items()},
            "seconds_by_phase": seconds_by_phase,
            "tokens_per_second_by_phase": {name: tokens / s for name, s in seconds_by_phase.items()},
            "utilisation_by_phase": {name: tokens * flops[name] / s / peak for name, s in seconds_by_phase.items()},
        },
    )


def _product_rate(setting: Setting) -> float:
    """Return the FLOPs per second of a large bf16 product."""
    return matmul_rate(setting) if setting.device.type == "cuda" else 1e9 * quiet_figures()["matmul_bf16_gflops"]


def _forward_flops(engine: Engine, length: int) -> float:
    """Return the FLOPs of a forward per token."""
    config: Any = engine.module.backbone.config  # type: ignore[union-attr]
    parameters = sum(p.numel() for p in engine.module.parameters())
    return 2.0 * parameters + 2.0 * config.num_hidden_layers * config.hidden_size * length
