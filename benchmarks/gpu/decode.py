"""Milliseconds per decode step and tokens per second: our generator, transformers' `generate` and continuous batching.

The milliseconds of a step are (time of all tokens - time of one token) / (tokens - 1), which excludes the prefill. The
floor is the time to read the weights and the cache of the middle of the answer once, at the GPU's copy rate. Published
figures of DeepSpeed's hybrid engine on an H100 for the same work: 5.0 to 5.6 ms per step at batch 1 to 32, and 360.8 ms
for batch 8 and 128 tokens with CUDA graphs.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.ceilings import copy_rate
from benchmarks.gpu.setting import Setting, failure
from engine import Generator, Sampling

PUBLISHED_STEP_MS, PUBLISHED_BATCHES = (5.0, 5.6), range(1, 33)
PUBLISHED_TOTAL_MS = {(8, 128): 360.8}  # by batch and new tokens
Generate = Callable[[nn.Module, list[list[int]], int], None]


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield one row per engine, batch and length. The row of a failure has the error."""
    module = setting.build().eval()
    module.generation_config.eos_token_id = None  # type: ignore[union-attr]
    generator = Generator(module, setting.device)
    engines: dict[str, Generate] = {"ours": partial(_ours, generator), "generate": _generate}
    if setting.device.type == "cuda":
        engines["generate_static"] = partial(_generate, cache="static")
        engines["continuous_batching"] = _continuous
    rate = copy_rate(setting)
    prompt = setting.of(256, 8)
    for new in setting.of((128, 256), (6,)):
        for batch in setting.of((1, 8, 32, 128), (1, 3)):
            floor = 1e3 * step_bytes(module, setting.shape, batch, prompt + new // 2) / rate
            for name, generate in engines.items():
                if setting.quick and (new > 128 or name not in ("ours", "generate")):
                    continue
                yield {
                    "case": name,
                    "batch": batch,
                    "prompt": prompt,
                    "new": new,
                    "floor_ms": floor,
                    **_published(batch, new),
                    **_measured(setting, partial(generate, module), batch, prompt, new, floor),
                }


def _published(batch: int, new: int) -> dict[str, Any]:
    """Return DeepSpeed's published figures for this work, if there are any."""
    step = {"deepspeed_published_step_ms": PUBLISHED_STEP_MS} if batch in PUBLISHED_BATCHES else {}
    total = PUBLISHED_TOTAL_MS.get((batch, new))
    return step if total is None else {**step, "deepspeed_published_total_ms": total}


def step_bytes(module: nn.Module, shape: dict[str, Any], batch: int, tokens: int) -> int:
    """Return the bytes that a decode step reads: the parameters once, and the keys and values."""
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    size = next(module.parameters()).element_size()
    return weights + 2 * batch * tokens * shape["num_hidden_layers"] * shape["hidden_size"] * size


def _measured(
    setting: Setting, generate: Callable[[list[list[int]], int], None], batch: int, prompt: int, new: int, floor: float
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(10, setting.shape["vocab_size"], (batch, prompt), generator=generator).tolist()
    repeats = 1 if setting.quick or setting.tiny else 3
    try:
        total, first = (setting.seconds(partial(generate, prompts, n), repeats) for n in (new, 1))
    except Exception as problem:
        return failure(problem)
    step = 1e3 * (total - first) / (new - 1)
    return {
        "step_ms": step,
        "over_floor": step / floor,
        "total_ms": 1e3 * total,
        "prompt_ms": 1e3 * first,
        "tokens_per_second": batch * new / total,
    }


def _ours(generator: Generator, module: nn.Module, prompts: list[list[int]], new: int) -> None:
    answers = generator.generate(prompts, Sampling(new), list(range(len(prompts))), len(prompts))
    assert generator.fallback is None and all(len(answer.token_ids) == new for answer in answers)


@torch.inference_mode()
def _generate(module: nn.Module, prompts: list[list[int]], new: int, cache: str | None = None) -> None:
    ids = torch.tensor(prompts, device=next(module.parameters()).device)
    output: Tensor = module.generate(  # type: ignore[operator, assignment]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        cache_implementation=cache,
    )
    assert output.shape[1] == ids.shape[1] + new


def _continuous(module: nn.Module, prompts: list[list[int]], new: int) -> None:
    """Run continuous batching. Its own thread writes the tensors, and that thread is not in inference mode."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    outputs = module.generate_batch(inputs=prompts, generation_config=config)  # type: ignore[operator]
    assert len(outputs) == len(prompts) and all(len(one.generated_tokens) == new for one in outputs.values())
