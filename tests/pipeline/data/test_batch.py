"""Batches contain every example exactly once, and their tensors contain the tokens of the examples."""

import random
import tracemalloc

import numpy as np
import pytest
import torch

from pipeline.data.batch import (
    Documents,
    batch_indices,
    collate_pairs,
    epoch_order,
    pack_pairs,
    shared_tokens,
    token_batch,
)
from pipeline.data.encode import PairItem, TokenItem
from pipeline.data.microbatches import divide_batch

PAD = 9


def item(*ids: int, counts: str) -> TokenItem:
    return TokenItem(np.array(ids, dtype=np.int32), np.array([c == "1" for c in counts]))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_batches_contain_each_index_once_within_the_token_budget(ranks: int, packing: bool) -> None:
    rng = random.Random(ranks)
    for _ in range(30):
        n, longest = rng.randrange(0, 40), rng.choice([4, 30, 300])
        lengths = [rng.randint(1, longest) for _ in range(n)]
        budget = rng.choice([8, 64, 512])
        cut = divide_batch(lengths, ranks=ranks, budget=budget, packing=packing)
        assert len(cut) == ranks and len({len(batches) for batches in cut}) == 1
        assert sorted(index for batches in cut for batch in batches for index in batch) == list(range(n))
        assert cut == divide_batch(lengths, ranks=ranks, budget=budget, packing=packing)
        for batches in cut:
            assert all(batches[i] or not any(batches[i:]) for i in range(len(batches)))  # empty batches are last
            for batch in batches:
                assert shape(batch, lengths, packing) <= budget or len(batch) == 1
        if n >= ranks:
            loads = [sum(lengths[index] for batch in batches for index in batch) for batches in cut]
            assert max(loads) - min(loads) <= max(lengths)


def shape(batch: list[int], lengths: list[int], packing: bool) -> int:
    """Return the number of tokens in the batch's tensor, including padding."""
    inside = [lengths[index] for index in batch]
    if not inside:
        return 0
    items = [item(*[1] * length, counts="1" * length) for length in inside]
    return token_batch(items, PAD, packing=packing).input_ids.numel()


def test_micro_batches_are_empty_only_if_unavoidable() -> None:
    assert divide_batch([5], ranks=2, budget=8, packing=False) == [[[0]], [[]]]
    # Rank 0 has the long example and needs one micro-batch; rank 1 would need two.
    cut = divide_batch([40, 9, 9, 9, 9, 9], ranks=2, budget=40, packing=False)
    assert [len(batches) for batches in cut] == [2, 2]
    assert cut[0] == [[0], []]
    cut = divide_batch([8, 8, 8, 8, 8, 8], ranks=1, budget=16, packing=False)
    assert cut == [[[0, 1], [2, 3], [4, 5]]]
    # Rank 1's row of two documents is divided, because rank 0 needs two rows for its documents.
    cut = divide_batch([8, 7, 3, 3], ranks=2, budget=10, packing=True)
    assert cut == [[[0], [3]], [[1], [2]]]


def test_similar_lengths_share_a_micro_batch() -> None:
    cut = divide_batch([100, 3, 98, 2, 4, 99], ranks=1, budget=300, packing=False)
    assert cut == [[[0, 5, 2], [4, 1, 3]]]


def test_packing_fills_micro_batches_evenly() -> None:
    assert divide_batch([6, 5, 4, 3, 2], ranks=1, budget=11, packing=True) == [[[0, 3, 4], [1, 2]]]
    # Equal parts do not fit.
    assert divide_batch([6, 5, 4, 3, 2], ranks=1, budget=10, packing=True) == [[[0, 2], [1, 3, 4]]]
    assert divide_batch([12, 5], ranks=1, budget=10, packing=True) == [[[0], [1]]]
    lengths = [random.Random(i).randint(1, 50) for i in range(200)]
    (cut,) = divide_batch(lengths, ranks=1, budget=640, packing=True)
    assert len(cut) == -(-sum(lengths) // 640)
    tokens = [sum(lengths[index] for index in batch) for batch in cut]
    assert max(tokens) - min(tokens) <= 2


def test_rows_of_one_document() -> None:
    batch = token_batch([item(5, 6, 7, counts="011"), item(8, 9, counts="11")], PAD, packing=False)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, PAD]]
    assert batch.scored.tolist() == [1, 2, 4]  # the first token of a document is not predicted
    assert batch.documents is None and batch.input_ids.dtype == torch.long


def test_one_row_of_documents() -> None:
    items = [item(5, 6, counts="11"), item(1, 2, 3, counts="101"), item(7, 8, 8, 8, counts="0111")]
    batch = token_batch(items, PAD, packing=True)
    assert batch.input_ids.tolist() == [[5, 6, 1, 2, 3, 7, 8, 8, 8]]
    assert batch.documents == Documents((2, 3, 4))
    assert batch.scored.tolist() == [1, 4, 6, 7, 8]


def test_empty_batches_have_no_scored_tokens() -> None:
    for batch in (token_batch([], PAD, packing=False), token_batch([], PAD, packing=True)):
        assert batch.input_ids.tolist() == [[PAD]] and not len(batch.scored)
    assert collate_pairs([], PAD).input_ids.tolist() == [[PAD], [PAD]]
    assert pack_pairs([], PAD).input_ids.tolist() == [[PAD, PAD]]
    for pairs in (collate_pairs([], PAD), pack_pairs([], PAD)):
        assert pairs.ends.tolist() == [0, 1] and len(pairs.margins) == 0


FIRST = PairItem(np.array([1, 2, 3]), np.array([1, 4]), 0.5, "a", 1)
SECOND = PairItem(np.array([5]), np.array([6, 7, 8, 9]), 0.0, "b", 0)


def test_pairs_are_chosen_rows_then_rejected_rows() -> None:
    batch = collate_pairs([FIRST, SECOND], PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3, PAD], [5, PAD, PAD, PAD], [1, 4, PAD, PAD], [6, 7, 8, 9]]
    assert batch.input_ids.flatten()[batch.ends].tolist() == [3, 5, 4, 9]
    assert batch.margins.tolist() == [0.5, 0.0]
    moved = batch.to("meta")
    assert moved.input_ids.device.type == "meta" and moved.documents is None


def test_pairs_in_one_row_share_their_common_prefix() -> None:
    batch = pack_pairs([FIRST, SECOND], PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch.documents == Documents((1, 2, 1, 1, 4), (None, 0, 0, None, None))
    assert batch.input_ids.flatten()[batch.ends].tolist() == [3, 5, 4, 9]
    assert batch.margins.tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2, 3], [1, 2], 1), ([1], [1, 2], 0), ([5, 2], [6, 2], 0), ([1, 2], [1, 2], 1)],
)
def test_each_answer_has_a_token_outside_the_shared_prefix(chosen: list[int], rejected: list[int], shared: int) -> None:
    assert shared_tokens(PairItem(np.array(chosen), np.array(rejected), 0.0, "", 0)) == shared


def test_batches_continue_over_epochs() -> None:
    n, size = 10, 4
    used = [index for step in range(10) for index in batch_indices(n, size, seed=3, step=step)]
    for epoch in range(4):
        assert used[epoch * n : (epoch + 1) * n] == list(epoch_order(n, 3, epoch))
        assert sorted(epoch_order(n, 3, epoch)) == list(range(n))
    assert epoch_order(n, 3, 0) != epoch_order(n, 3, 1) != epoch_order(n, 4, 1)
    assert batch_indices(3, 7, seed=0, step=0) == [i for e in range(3) for i in epoch_order(3, 0, e)][:7]


def test_the_order_of_a_large_epoch_is_small() -> None:
    tracemalloc.start()
    order = epoch_order(100_000, seed=7, epoch=0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order) == 100_000 and size < 1_000_000
