"""Every example is planned exactly once, and tensors hold what went in."""

import random

import numpy as np
import pytest
import torch

from pipeline.data.batch import (
    batch_indices,
    collate_pairs,
    collate_tokens,
    epoch_order,
    pack_tokens,
    plan,
)
from pipeline.data.encode import PairItem, TokenItem
from pipeline.data.planning import packed_rows

PAD = 9


def item(*ids: int, counts: str) -> TokenItem:
    return TokenItem(np.array(ids, dtype=np.int32), np.array([c == "1" for c in counts]))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_plans_use_every_index_once_within_the_budget(ranks: int, packing: bool) -> None:
    rng = random.Random(ranks)
    for _ in range(150):
        n, longest = rng.randrange(0, 40), rng.choice([4, 30, 300])
        lengths = [rng.randint(1, longest) for _ in range(n)]
        budget, max_length = rng.choice([8, 64, 512]), rng.choice([longest, 2 * longest])
        cut = plan(lengths, ranks=ranks, budget=budget, packing=packing, max_length=max_length)
        assert len(cut) == ranks and len({len(batches) for batches in cut}) == 1
        assert sorted(index for batches in cut for batch in batches for index in batch) == list(range(n))
        assert cut == plan(lengths, ranks=ranks, budget=budget, packing=packing, max_length=max_length)
        for batches in cut:
            assert all(batches[i] or not any(batches[i:]) for i in range(len(batches)))  # empty ones at the end
            for batch in batches:
                assert shape(batch, lengths, packing, max_length) <= budget or len(batch) == 1
        if n >= ranks:
            loads = [sum(lengths[index] for batch in batches for index in batch) for batches in cut]
            assert max(loads) - min(loads) <= max(lengths)


def shape(batch: list[int], lengths: list[int], packing: bool, max_length: int) -> int:
    """Tokens of the batch's tensor, padding included."""
    inside = [lengths[index] for index in batch]
    if not inside:
        return 0
    items = [item(*[1] * length, counts="1" * length) for length in inside]
    made = pack_tokens(items, PAD, max_length) if packing else collate_tokens(items, PAD)
    return made.input_ids.numel()


def test_empty_micro_batches_are_the_last_resort() -> None:
    assert plan([5], ranks=2, budget=8, packing=False, max_length=8) == [[[0]], [[]]]
    # rank 0 holds the long one and needs 1 micro-batch, rank 1 would need 2
    cut = plan([40, 9, 9, 9, 9, 9], ranks=2, budget=40, packing=False, max_length=40)
    assert [len(batches) for batches in cut] == [2, 2]
    assert cut[0] == [[0], []]
    cut = plan([8, 8, 8, 8, 8, 8], ranks=1, budget=16, packing=False, max_length=8)
    assert cut == [[[0, 1], [2, 3], [4, 5]]]
    # rank 1's row of two documents is halved, to keep step with rank 0, whose two don't fit one row
    cut = plan([8, 7, 3, 3], ranks=2, budget=10, packing=True, max_length=10)
    assert cut == [[[0], [3]], [[1], [2]]]


def test_the_largest_micro_batch_runs_first() -> None:
    assert plan([6, 5, 5], ranks=1, budget=10, packing=False, max_length=6) == [[[1, 2], [0]]]


def test_similar_lengths_share_a_micro_batch() -> None:
    cut = plan([100, 3, 98, 2, 4, 99], ranks=1, budget=300, packing=False, max_length=100)
    assert cut == [[[0, 5, 2], [4, 1, 3]]]


def test_packing_fills_rows() -> None:
    assert packed_rows([6, 5, 4, 3, 2], capacity=10) == [[0, 2], [1, 3, 4]]
    assert packed_rows([12, 5], capacity=10) == [[0], [1]]
    lengths = [random.Random(i).randint(1, 50) for i in range(200)]
    rows = packed_rows(lengths, capacity=64)
    assert len(rows) <= 1.1 * sum(lengths) / 64 + 1
    some = [index for row in rows[::3] for index in row]
    again = packed_rows([lengths[index] for index in some], capacity=64)
    assert [[some[place] for place in row] for row in again] == rows[::3]


def test_rows_of_one_document() -> None:
    batch = collate_tokens([item(5, 6, 7, counts="011"), item(8, 9, counts="11")], PAD)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, PAD]]
    assert batch.score_mask.tolist() == [[False, True, True], [False, True, False]]  # a first token has no prediction
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.document_ids is None and batch.input_ids.dtype == torch.long


def test_packed_rows_keep_documents_apart() -> None:
    batch = pack_tokens([item(5, 6, counts="11"), item(1, 2, 3, counts="101"), item(7, 8, 8, 8, counts="0111")], PAD, 5)
    assert batch.input_ids.tolist() == [[7, 8, 8, 8, PAD], [1, 2, 3, 5, 6]]
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, -1], [0, 0, 0, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    assert batch.score_mask.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 0, 1]]


def test_empty_batches_count_nothing() -> None:
    for batch in (collate_tokens([], PAD), pack_tokens([], PAD, 5)):
        assert batch.input_ids.tolist() == [[PAD]] and not batch.score_mask.any()
    pairs = collate_pairs([], PAD)
    assert pairs.input_ids.tolist() == [[PAD], [PAD]] and len(pairs.margins) == 0
    assert pairs.lengths.tolist() == [1, 1] and pairs.sources == ()


def test_pairs_are_chosen_rows_then_rejected_rows() -> None:
    first = PairItem(np.array([1, 2, 3]), np.array([1, 4]), 0.5, "a")
    second = PairItem(np.array([5]), np.array([6, 7, 8, 9]), 0.0, "b")
    batch = collate_pairs([first, second], PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3, PAD], [5, PAD, PAD, PAD], [1, 4, PAD, PAD], [6, 7, 8, 9]]
    assert batch.lengths.tolist() == [3, 1, 2, 4]
    assert batch.margins.tolist() == [0.5, 0.0] and batch.sources == ("a", "b")
    moved = batch.to("meta")
    assert moved.input_ids.device.type == "meta" and moved.sources == ("a", "b")


def test_epochs_follow_one_another() -> None:
    n, size = 10, 4
    taken = [index for step in range(10) for index in batch_indices(n, size, seed=3, step=step)]
    for epoch in range(4):
        assert taken[epoch * n : (epoch + 1) * n] == list(epoch_order(n, 3, epoch))
        assert sorted(epoch_order(n, 3, epoch)) == list(range(n))
    assert epoch_order(n, 3, 0) != epoch_order(n, 3, 1) != epoch_order(n, 4, 1)
    assert batch_indices(3, 7, seed=0, step=0) == [i for e in range(3) for i in epoch_order(3, 0, e)][:7]
