"""Rows that are stored in one array are returned unchanged."""

import pickle

import numpy as np
import pytest

from pipeline.data.encode import TokenRows

ROWS = [[3, 1, 70000], [], [5], [-2, 9]]


def test_rows_are_returned_unchanged() -> None:
    rows = TokenRows()
    for row in ROWS:
        rows.append(row)
    for each in (rows, pickle.loads(pickle.dumps(rows))):
        assert list(each) == ROWS and len(each) == 4 and each[-1] == [-2, 9] and each[1:3] == [[], [5]]
        assert [each.view(place).tolist() for place in range(4)] == ROWS and each.view(0).dtype == np.int32
        with pytest.raises(IndexError):
            each[4]
    assert not TokenRows() and not TokenRows()[:2]


def test_flags_take_a_byte_each() -> None:
    flags = TokenRows("b")
    flags.append([True, False])
    assert flags.view(0).dtype == np.bool_ and flags.view(0).tolist() == [True, False]
