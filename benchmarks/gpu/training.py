"""Training of all parameters: tokens per second and utilisation by ZeRO stage and tier, and the largest OPT per tier.

Utilisation = (6 P + 12 L D T) x tokens per second / measured bf16 product rate of the GPU, with P parameters, L layers,
D hidden size, T sequence length (Chowdhery et al., 2022, arXiv:2204.02311, appendix B).
"""

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.gpu.ceilings import matmul_rate
from benchmarks.gpu.setting import OPT_1_3B, Setting, failure
from engine import EngineConfig, OptimizerConfig, token_logprobs
from engine.engine import Engine
from engine.memory import ModelShape, ModelStates, Workload, trained_states
from engine.parallel import dtensors, zero

TIERS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2 + cpu optimizer": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "zero3 + cpu optimizer and parameters": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}
SIZES: dict[str, tuple[int, int, int]] = {  # hidden size, layers, heads (Zhang et al., 2022, arXiv:2205.01068, table 1)
    "opt-1.3b": (2048, 24, 32),
    "opt-2.7b": (2560, 32, 32),
    "opt-6.7b": (4096, 32, 32),
    "opt-13b": (5120, 40, 40),
    "opt-30b": (7168, 48, 56),
}
OPTIMIZER = OptimizerConfig(lr=1e-5)


class Policy(nn.Module):
    """A language model whose forward returns the log-probabilities of its tokens, as in the stages."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator, union-attr]
        rows = hidden[:, :-1].reshape(-1, hidden.shape[-1])
        return token_logprobs(rows, self.lm.get_output_embeddings().weight, ids[:, 1:].reshape(-1))[0]  # type: ignore[operator]


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield the speed of each tier."""
    peak = matmul_rate(setting)
    batch, length, micro = setting.of((8, 1024, 2), (2, 16, 2))
    for name in list(TIERS)[1:4:2] if setting.quick else TIERS:
        row = {"case": name, "model": setting.name, "batch": batch, "length": length}
        try:
            seconds, parameters = _step_seconds(setting, setting.shape, TIERS[name], batch, length, micro)
            layer_widths = setting.shape["num_hidden_layers"] * setting.shape["hidden_size"]
            rate = batch * length / seconds
            share = rate * (6 * parameters + 12 * length * layer_widths) / peak
            yield {**row, "tokens_per_second": rate, "utilisation": share, "peak_gib": setting.peak_gib()}
        except Exception as problem:
            yield {**row, **failure(problem)}
        setting.clear()


def largest(setting: Setting) -> Iterator[dict[str, Any]]:
    """Train the largest OPT that should fit in each tier, with steps of 512 tokens. If it fails, train a smaller one.

    The host memory of the tier is predicted too, because the system kills the process when host memory runs out.
    """
    free = torch.cuda.mem_get_info()[0] if setting.device.type == "cuda" else 2**34
    host = psutil.virtual_memory().available
    for name in list(TIERS)[2:5:2] if setting.quick else TIERS:
        sizes = setting.of(list(SIZES), ["tiny"])
        predicted = {size: _predicted(setting, size, TIERS[name]) for size in sizes}
        fitting = [
            size for size, states in predicted.items() if states.peak <= 0.95 * free and states.host <= 0.85 * host
        ]
        for size in fitting[::-1]:
            row = {"case": name, "model": size, "predicted_gib": predicted[size].peak / 2**30}
            try:
                seconds, _ = _step_seconds(setting, _shape(setting, size), TIERS[name], 1, setting.of(512, 16), 1)
                yield {**row, "trains": True, "step_seconds": seconds, "peak_gib": setting.peak_gib()}
                break
            except Exception as problem:
                yield {**row, "trains": False, **failure(problem)}
            finally:
                setting.clear()


def _shape(setting: Setting, size: str) -> dict[str, Any]:
    if setting.tiny:
        return setting.shape
    hidden, layers, heads = SIZES[size]
    return OPT_1_3B | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "word_embed_proj_dim": hidden,
    }


def _predicted(setting: Setting, size: str, tier: dict[str, Any]) -> ModelStates:
    """Predict the model states in a step of one micro-batch."""
    model = setting.blueprint(_shape(setting, size))
    units = [sum(p.numel() for p in unit.parameters()) for unit in zero.units(model)]
    total = sum(p.numel() for p in model.parameters())
    shape = ModelShape(total, root=total - sum(units), block=max(units))
    return trained_states(shape, Workload(EngineConfig(**tier), step_tokens=1))


def _step_seconds(
    setting: Setting, shape: dict[str, Any], tier: dict[str, Any], batch: int, length: int, micro: int
) -> tuple[float, int]:
    """Return the seconds of a step (the better of two after a warm-up) and the number of parameters."""
    config = EngineConfig(dtype=setting.of("bf16", "fp32"), activation_checkpointing=not setting.tiny, **tier)
    engine = Engine(Policy(setting.blueprint(shape)), config, optimizer=OPTIMIZER, fill=fill)
    ids = torch.randint(10, shape["vocab_size"], (batch, length), device=setting.device)
    seconds = []
    for _ in range(3):
        setting.wait()
        start = perf_counter()
        engine.update(list(ids.split(micro)), negative_logprobs, batch * (length - 1))
        setting.wait()
        seconds.append(perf_counter() - start)
    return min(seconds[1:]), sum(p.numel() for p in engine.module.parameters())


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Sample random weights on the device of each parameter."""
    for parameter in module.parameters():
        dtensors.local(parameter).normal_(std=0.02)


def negative_logprobs(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return -module(ids).sum(), {}
