"""Embedding and head as FSDP units of their own: what two ranks hold and when, and the numbers of one rank."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, initialize, token_logprobs
from engine.memory import Workload, frozen_states, measure_shape
from engine.memory.tracker import storage_bytes
from engine.parallel import collectives, dist, zero
from tests.engine.parallel.test_tensor import SGD, VOCABULARY, batch, made, same
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

WIDE = {"vocab_size": 4 * VOCABULARY, "num_hidden_layers": 3}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", WIDE, {"zero_stage": 3}),
    ("llama", WIDE, {"zero_stage": 1}),
    ("llama", WIDE | {"tie_word_embeddings": True}, {"zero_stage": 3}),
    ("llama", WIDE, {"zero_stage": 3, "offload_optimizer": "cpu"}),
]


class Scored(nn.Module):
    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def outer_layers(self) -> list[nn.Module]:
        return [self.lm.get_input_embeddings(), self.lm.get_output_embeddings()]

    def forward(self, ids: Tensor) -> Any:
        hidden = self.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        return token_logprobs(hidden, self.lm.get_output_embeddings(), ids[:, 1:].flatten(), 0.7)


def loss_of(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    logprobs, entropies = module(ids)
    return -logprobs.sum() - 0.3 * entropies.sum(), {}


@dataclass(frozen=True)
class Found:
    """Curves and weights; gathered bytes at each block's forward, and after a forward; elements of each reduction."""

    curves: tuple[list[float], list[float], dict[str, Tensor]]
    in_blocks: list[int]
    at_end: int
    reduced: list[int]


def case(family: str, more: dict[str, Any], layout: dict[str, Any]) -> Found:
    engine = initialize(Scored(made(family, **more)), EngineConfig(dtype="fp32", **layout), optimizer=SGD)
    world, reduced, in_blocks = dist.world(), list[int](), list[int]()
    exchange = collectives.all_to_all

    def watched(rows: Tensor, *rest: Any, **more: Any) -> Tensor:
        reduced.append(rows.numel())
        return exchange(rows, *rest, **more)

    collectives.all_to_all = watched
    updates = [engine.update(list(batch(step)[world.rank :: world.size].split(1)), loss_of, 8) for step in range(2)]
    collectives.all_to_all = exchange

    def gathered() -> int:
        return storage_bytes(zero.gathered(engine.module)) if world.size > 1 else 0

    for unit in zero.units(engine.module):
        unit.register_forward_pre_hook(lambda *_: in_blocks.append(gathered()))
    with torch.no_grad():
        engine.module(batch(0))
    curves = [update.loss for update in updates], [update.grad_norm for update in updates], full_weights(engine)
    return Found(curves, in_blocks, gathered(), reduced)


def found_all() -> list[Found]:
    torch.set_num_threads(1)
    return [case(*each) for each in CASES]


@pytest.fixture(scope="module")
def ranks() -> list[list[Found]]:
    return run_ranks(found_all, 2)


def test_two_ranks_learn_what_one_learns(ranks: list[list[Found]]) -> None:
    alone = found_all()
    for rank in ranks:
        for found, wanted in zip(rank, alone, strict=True):
            same(found.curves, wanted.curves)


def test_blocks_run_without_embedding_and_head(ranks: list[list[Found]]) -> None:
    shape = measure_shape("llama", made("llama", **WIDE).config)
    layer = 4 * VOCABULARY * 32
    assert (shape.embedding, shape.head, shape.root_unit) == (layer, layer, 32)
    tied = measure_shape("llama", made("llama", **WIDE, tie_word_embeddings=True).config)
    assert (tied.largest_released, tied.root_unit) == (tied.block, tied.root)
    work = Workload(config=EngineConfig(zero_stage=3, dtype="fp32"), ranks=2)
    predicted = frozen_states(shape, work).gathered
    assert predicted == 4 * (32 + layer + shape.block)  # the norm, embedding or head, and a block that is prefetched
    for rank in ranks:
        one, _, both, _ = rank
        assert max(one.in_blocks) <= 4 * (32 + 2 * shape.block)  # the norm, this block, and perhaps the next
        assert one.at_end == 4 * (layer + 32) <= predicted  # backward begins with norm and head
        assert min(both.in_blocks) >= 4 * layer
