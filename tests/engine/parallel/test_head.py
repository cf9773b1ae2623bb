"""A head split over two ranks gives the losses and updates of one rank, and gathers neither logits nor weights."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, initialize, token_logprobs
from engine.parallel import collectives, dtensors
from tests.engine.parallel.test_tensor import OPT_PLAN, SGD, VOCABULARY, batch, made, same
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"zero_stage": 3}),
    (
        "llama",
        {"tie_word_embeddings": True, "pad_token_id": 50},
        {"zero_stage": 0},
    ),  # padding in the second rank's rows
    ("opt", {"pad_token_id": 1}, {"zero_stage": 2}),  # tied, too
    ("llama", {"vocab_size": VOCABULARY + 1}, {"zero_stage": 0}),  # not divisible, so not split
]


class Scored(nn.Module):
    """A language model whose forward gives log-probabilities and entropies of the next tokens."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor, full: bool = False) -> Any:
        if full:
            return self.lm(input_ids=ids, use_cache=False).logits
        hidden = self.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        head = self.lm.get_output_embeddings()
        return token_logprobs(hidden, head.weight, ids[:, 1:].flatten(), 0.7, head.bias)


def loss_of(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Return a loss with a different gradient for each token, and with a gradient for the entropies."""
    logprobs, entropies = module(ids)
    slopes = torch.linspace(-1, 1, len(logprobs))
    return (slopes * logprobs).sum() - 0.3 * entropies.sum(), {"rows": float(len(ids))}


@dataclass(frozen=True)
class Results:
    """Losses, gradient norms and weights of a case; this rank's rows of the head, the numbers of the largest gathered
    tensor, and the logits of the model's own forward.
    """

    curves: tuple[list[float], list[float], dict[str, Tensor]]
    rows: int
    gathered: int
    logits: Tensor


def train_cases(ranks: int) -> list[Results]:
    torch.set_num_threads(1)
    return [train_case(ranks, *each) for each in CASES]


def train_case(ranks: int, family: str, more: dict[str, Any], layout: dict[str, Any]) -> Results:
    plan = OPT_PLAN if family == "opt" and ranks > 1 else None
    config = EngineConfig(dtype="fp32", tensor_parallel=ranks, tensor_plan=plan, **layout)
    engine = initialize(Scored(made(family, **more)), config, optimizer=SGD)
    lm: Any = engine.module.lm
    gather, gathered = collectives.gather_tensors, [0]

    def watched(tensor: Tensor, group: Any, **more: Any) -> Tensor:
        gathered.append(tensor.numel())
        return gather(tensor, group, **more)

    collectives.gather_tensors = watched
    updates = [engine.update([batch(step)], loss_of, 4) for step in range(2)]
    collectives.gather_tensors = gather
    with engine.scoring() as module:
        logits = module(batch(0), full=True)
    rows = len(dtensors.local(lm.get_output_embeddings().weight.detach()))
    curves = [update.loss for update in updates], [update.grad_norm for update in updates], full_weights(engine)
    return Results(curves, rows, max(gathered), logits)


@pytest.fixture(scope="module")
def ranks() -> list[list[Results]]:
    return run_ranks(train_cases, 2, 2)


@pytest.fixture(scope="module")
def one_rank() -> list[Results]:
    return train_cases(1)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_ranks_train_like_one_rank(number: int, ranks: list[list[Results]], one_rank: list[Results]) -> None:
    for rank in ranks:
        same(rank[number].curves, one_rank[number].curves)


def test_divisible_rows_are_split_and_nothing_is_gathered(ranks: list[list[Results]]) -> None:
    for rank in ranks:
        assert [actual.rows for actual in rank] == [VOCABULARY // 2] * 3 + [VOCABULARY + 1]
        assert [actual.gathered for actual in rank] == [0] * 4


def test_the_models_own_forward_returns_all_logits(ranks: list[list[Results]], one_rank: list[Results]) -> None:
    for rank in ranks:
        for actual, expected in zip(rank, one_rank, strict=True):
            torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)
