"""Generation from ZeRO-3 on two ranks gives the log-probabilities of the sharded module, for every family and LoRA."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import GPTJForCausalLM
from transformers.pytorch_utils import Conv1D

from engine.config import EngineConfig
from engine.engine import Engine
from engine.generation.model_support import LENGTHS
from engine.generation.sampling import Sampling
from engine.parallel import dtensors
from tests.engine.generation.families import ENDS, FAMILIES, build, ragged_prompts
from tests.ranks import run_ranks

PROMPTS = ragged_prompts(3, 1, 14)
GREEDY = Sampling(6, temperature=0, end_ids=ENDS)
PADDED = {"bloom", "falcon"} | (set() if GPTJForCausalLM._supports_sdpa else {"gptj"})  # up to transformers 5.23


class Wrapper(nn.Module):
    """A training module that contains a language model, like the policy."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.lm(input_ids, use_cache=False).logits
        return logits


def with_adapters(model: nn.Module) -> nn.Module:
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    config = LoraConfig(r=2, target_modules=sorted(layers - {"lm_head"}), init_lora_weights=False)
    inject_adapter_in_model(config, model)
    return model


def flip(family: str, adapters: bool) -> dict[str, Any]:
    """Generate, change the weights of the sharded model, and generate again. Score the answers by its own forward."""
    torch.set_num_threads(1)
    model = with_adapters(build(family)) if adapters else build(family)
    engine = Engine(Wrapper(model), EngineConfig(zero_stage=3, dtype="fp32"), rollout_path="lm")
    with engine.generating() as rollouts:
        rollouts.generate(PROMPTS[:1], GREEDY, [0])
    with torch.no_grad():
        for parameter in engine.module.parameters():
            dtensors.local(parameter).mul_(1.05)
    with engine.generating() as rollouts:
        answers = rollouts.generate(PROMPTS, GREEDY, [0] * 3, batch_size=2)
    with engine.scoring() as module:
        gaps = [
            _gap(module(torch.tensor([prompt + answer.token_ids]))[0, len(prompt) - 1 : -1], answer)
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ]
    return {"fallback": rollouts.fallback, "checked": len(engine.flip.checked), "gaps": gaps}


def _gap(logits: Tensor, answer: Any) -> tuple[bool, float]:
    """Return whether the tokens are the most probable ones, and the largest error of their log-probabilities."""
    likeliest = logits.argmax(-1).tolist() == answer.token_ids
    logprobs = logits.double().log_softmax(-1)[range(len(answer.token_ids)), answer.token_ids]
    return likeliest, (logprobs - torch.tensor(answer.logprobs)).abs().max().item()


LIKE_LLAMA = {"qwen2", "mistral", "gemma2"}  # the same kinds of parameters as others; test_generator runs these too
CASES = [*((family, True) for family in FAMILIES if family not in LIKE_LLAMA), ("llama", False)]


def flip_all() -> dict[tuple[str, bool], dict[str, Any]]:
    return {case: flip(*case) for case in CASES}


@pytest.fixture(scope="module")
def flips() -> list[dict[tuple[str, bool], dict[str, Any]]]:
    return run_ranks(flip_all, 2)


@pytest.mark.parametrize(("family", "adapters"), CASES)
def test_generation_equals_the_sharded_module(
    flips: list[dict[tuple[str, bool], dict[str, Any]]], family: str, adapters: bool
) -> None:
    for rank in flips:
        actual = rank[family, adapters]
        assert (actual["fallback"] is not None) == (family in PADDED)
        assert actual["checked"] == len(LENGTHS)
        assert all(likeliest and gap < 2e-4 for likeliest, gap in actual["gaps"])
