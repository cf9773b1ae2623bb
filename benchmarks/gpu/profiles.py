"""Time by kernel of decode steps and of a training step, from PyTorch's profiler."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.training import OPTIMIZER, TIERS, Policy, fill, negative_logprobs
from engine import EngineConfig, Generator, Sampling
from engine.engine import Engine

MAX_KERNELS = 15


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield one row per workload: its total device time and its slowest kernels."""
    yield from _decoding(setting)
    setting.clear()
    config = EngineConfig(dtype=setting.of("bf16", "fp32"), activation_checkpointing=not setting.tiny, **TIERS["zero2"])
    engine = Engine(Policy(setting.blueprint()), config, optimizer=OPTIMIZER, fill=fill)
    ids = torch.randint(10, setting.shape["vocab_size"], setting.of((2, 1024), (2, 16)), device=setting.device)
    yield {"case": "training step", **_by_kernel(setting, lambda: engine.update([ids], negative_logprobs, ids.numel()))}


def _decoding(setting: Setting) -> Iterator[dict[str, Any]]:
    module = setting.build().eval()
    generator, new_tokens = Generator(module, setting.device), setting.of(65, 4)
    for batch in setting.of((1, 32), (2,)):
        prompts = torch.randint(10, setting.shape["vocab_size"], (batch, setting.of(256, 8))).tolist()
        work = partial(generator.generate, prompts, Sampling(new_tokens), list(range(batch)))
        yield {"case": f"decode, batch {batch}, {new_tokens} tokens", **_by_kernel(setting, work)}


def _by_kernel(setting: Setting, work: Callable[[], object]) -> dict[str, Any]:
    is_gpu = setting.device.type == "cuda"
    work()
    setting.wait()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=kinds) as profiler:
        work()
        setting.wait()
    # On a GPU, operators and the ranges of `record_function` have the time of their kernels, which have events too.
    times = {
        e.key: (e.self_device_time_total if is_gpu else e.self_cpu_time_total, e.count)
        for e in profiler.key_averages()
        if not is_gpu or (e.device_type == DeviceType.CUDA and not e.is_user_annotation)
    }
    total = sum(time for time, _ in times.values())
    ranked = sorted(times.items(), key=lambda item: -item[1][0])[:MAX_KERNELS]
    kernels = [{"name": name[:80], "ms": time / 1e3, "calls": count} for name, (time, count) in ranked]
    return {"device_ms": total / 1e3, "kernels": kernels}
