"""Modules that are not chains of equal blocks, trained on two ranks under ZeRO 0 to 3, against plain PyTorch.

All losses and all weights are compared.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from engine import EngineConfig, OptimizerConfig, initialize
from engine.parallel import dist
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

STEPS, ROWS = 2, 4
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_key_value_heads": 1, "vocab_size": 48, "max_position_embeddings": 32, "num_experts_per_tok": 2}
SGD = OptimizerConfig(lr=0.1, name="sgd", options={"momentum": 0.9}, max_grad_norm=0.0)


class Chain(nn.Module):
    """Blocks that are the same module, share a weight, or are in nested lists."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 5), nn.Linear(5, 1)
        blocks = [nn.Linear(5, 5) for _ in range(4)]
        if kind == "looped":
            blocks = blocks[:1] * 3
        elif kind == "shared":
            blocks[3].weight = blocks[0].weight
        self.groups = nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])])
        if kind == "shared":
            self.groups = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for group in self.groups:
            for block in group if isinstance(group, nn.ModuleList) else [group]:
                x = x + torch.tanh(block(x))
        return self.head(x)


def causal(family: str, **experts: int) -> nn.Module:
    config = AutoConfig.for_model(family, **(SHAPE | EXPERTS | experts))
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "regression": lambda: nn.Linear(6, 1),
    "looped": lambda: Chain("looped"),
    "shared": lambda: Chain("shared"),
    "nested": lambda: Chain("nested"),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, num_labels=3, **SHAPE, **NO_DROPOUT)
    ),
    "mixtral": lambda: causal("mixtral", num_local_experts=4),
    "qwen3_moe": lambda: causal("qwen3_moe", num_experts=4, moe_intermediate_size=8, head_dim=8),
}


STAGES = {  # every stage for the weight that blocks share, and a stage without and with gathered weights for the others
    "regression": (0, 3),
    "looped": (1, 3),
    "shared": (0, 1, 2, 3),
    "nested": (2, 3),
    "vit": (2, 3),
    "mixtral": (0, 3),
    "qwen3_moe": (2, 3),
}
NUMBERS = ("regression", "looped", "shared", "nested")


def seeded_model(kind: str) -> nn.Module:
    torch.manual_seed(2)
    return MODELS[kind]()


def rows(kind: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if kind in NUMBERS:
        return torch.randn(ROWS, 6, generator=generator)
    if kind == "vit":
        return torch.randn(ROWS, 3, 8, 8, generator=generator)
    return torch.randint(0, 48, (ROWS, 9), generator=generator)


def loss_of(kind: str, model: Callable[..., Any], x: Tensor) -> Tensor:
    if kind in NUMBERS:
        return F.mse_loss(model(x), x.sum(1, keepdim=True))
    if kind == "vit":
        return F.cross_entropy(model(pixel_values=x).logits, (x.flatten(1).sum(1) > 0).long())
    return model(input_ids=x, labels=x, use_cache=False).loss  # type: ignore[no-any-return]


Results = tuple[list[float], dict[str, Tensor]]


def plain(kind: str) -> Results:
    model, losses = seeded_model(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = loss_of(kind, model, rows(kind, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_with_engine(kind: str, zero_stage: int) -> Results:
    config = EngineConfig(zero_stage=zero_stage, dtype="fp32", activation_checkpointing=kind in NUMBERS)
    engine, losses = initialize(seeded_model(kind), config, optimizer=SGD), []
    world = dist.world()
    for step in range(STEPS):
        loss = loss_of(kind, engine, rows(kind, step)[world.rank :: world.size])
        engine.backward(loss)
        engine.step()
        losses.append(dist.sum_over_ranks(loss.item()) / world.size)
    return losses, full_weights(engine)


def train_all() -> dict[tuple[str, int], Results]:
    torch.set_num_threads(1)
    return {(kind, stage): train_with_engine(kind, stage) for kind in MODELS for stage in STAGES[kind]}


def test_two_ranks_equal_plain_pytorch() -> None:
    expected = {kind: plain(kind) for kind in MODELS}
    for results in run_ranks(train_all, 2):
        for (kind, stage), (losses, weights) in results.items():
            assert losses == pytest.approx(expected[kind][0], rel=1e-5), (kind, stage)
            for name, weight in expected[kind][1].items():
                torch.testing.assert_close(
                    weights[name], weight, atol=1e-5, rtol=1e-4, msg=lambda m, at=(kind, stage, name): f"{at}: {m}"
                )
