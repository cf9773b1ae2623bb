"""Rows that are stored in one array are returned unchanged."""

import pickle

import numpy as np
import pytest

from pipeline.data.encode import ExampleRows, PromptItems, TokenItem

ROWS = [[3, 1, 70000], [], [5], [-2, 9]]


def test_rows_are_returned_unchanged() -> None:
    rows = PromptItems().ids
    for row in ROWS:
        rows.append(row)
    for each in (rows, pickle.loads(pickle.dumps(rows))):
        assert list(each) == ROWS and len(each) == 4 and each[-1] == [-2, 9] and each[1:3] == [[], [5]]
        with pytest.raises(IndexError):
            each[4]
    assert not PromptItems().ids and not PromptItems().ids[:2]


def test_flags_take_a_byte_each() -> None:
    items = ExampleRows(TokenItem, ("i", "b"))
    items.append([7, 8], [True, False])
    (item,) = items
    assert item.ids.dtype == np.int32 and item.ids.tolist() == [7, 8]
    assert item.counts.dtype == np.bool_ and item.counts.tolist() == [True, False]
