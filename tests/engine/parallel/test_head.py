"""A head split over two ranks: losses and updates are one rank's, and neither logits nor weight are gathered."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, initialize, token_logprobs
from engine.parallel import collectives, dtensors
from tests.engine.parallel.test_tensor import OPT_PLAN, SGD, VOCABULARY, batch, made, same, weights
from tests.ranks import run_ranks

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"zero_stage": 3}),
    ("llama", {"tie_word_embeddings": True, "pad_token_id": 50}, {"zero_stage": 0}),  # the second rank's padding
    ("opt", {"pad_token_id": 1}, {"zero_stage": 2}),  # tied as well
    ("llama", {"vocab_size": VOCABULARY + 1}, {"zero_stage": 0}),  # stays whole
]


class Scored(nn.Module):
    """A language model whose forward gives log-probabilities and entropies of the next tokens."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor, whole: bool = False) -> Any:
        if whole:
            return self.lm(input_ids=ids, use_cache=False).logits
        hidden = self.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        head = self.lm.get_output_embeddings()
        return token_logprobs(hidden, head.weight, ids[:, 1:].flatten(), 0.7, head.bias)


def loss_of(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    """A gradient of its own for every token, and one for the entropies."""
    logprobs, entropies = module(ids)
    slopes = torch.linspace(-1, 1, len(logprobs))
    return (slopes * logprobs).sum() - 0.3 * entropies.sum(), {"rows": float(len(ids))}


@dataclass(frozen=True)
class Found:
    """What a case showed: losses, gradient norms and weights; rows of the head that are here, the largest tensor that
    was gathered, and the logits that the model's own forward gives.
    """

    curves: tuple[list[float], list[float], dict[str, Tensor]]
    rows: int
    gathered: int
    logits: Tensor


def trained(ranks: int) -> list[Found]:
    torch.set_num_threads(1)
    return [case(ranks, *each) for each in CASES]


def case(ranks: int, family: str, more: dict[str, Any], layout: dict[str, Any]) -> Found:
    plan = OPT_PLAN if family == "opt" and ranks > 1 else None
    config = EngineConfig(dtype="fp32", tensor_parallel=ranks, tensor_plan=plan, **layout)
    engine = initialize(Scored(made(family, **more)), config, optimizer=SGD)
    lm: Any = engine.module.lm
    gather, gathered = collectives.gather_tensors, [0]

    def watched(tensor: Tensor, group: Any) -> list[Tensor]:
        gathered.append(tensor.numel())
        return gather(tensor, group)

    collectives.gather_tensors = watched
    updates = [engine.update([batch(step)], loss_of, 4) for step in range(3)]
    collectives.gather_tensors = gather
    with engine.scoring() as module:
        logits = module(batch(0), whole=True)
    rows = len(dtensors.local(lm.get_output_embeddings().weight.detach()))
    curves = [update.loss for update in updates], [update.grad_norm for update in updates], weights(engine)
    return Found(curves, rows, max(gathered), logits)


@pytest.fixture(scope="module")
def ranks() -> list[list[Found]]:
    return run_ranks(trained, 2, 2)


@pytest.fixture(scope="module")
def alone() -> list[Found]:
    return trained(1)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_ranks_learn_what_one_learns(number: int, ranks: list[list[Found]], alone: list[Found]) -> None:
    for rank in ranks:
        same(rank[number].curves, alone[number].curves)


def test_rows_are_shared_where_they_divide_and_nothing_is_gathered(ranks: list[list[Found]]) -> None:
    for rank in ranks:
        assert [found.rows for found in rank] == [VOCABULARY // 2] * 3 + [VOCABULARY + 1]
        assert [found.gathered for found in rank] == [0] * 4


def test_who_asks_for_logits_gets_them_whole(ranks: list[list[Found]], alone: list[Found]) -> None:
    for rank in ranks:
        for mine, wanted in zip(rank, alone, strict=True):
            torch.testing.assert_close(mine.logits, wanted.logits, atol=1e-4, rtol=1e-4)
