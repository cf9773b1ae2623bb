"""The DeepSpeed benchmark: both sides get the same tokens, and missing output of a rank raises an error."""

from pathlib import Path

import pytest
import torch

from benchmarks.measure import BenchFailed
from benchmarks.ranks import run_ranks
from benchmarks.zero.deepspeed import summarize
from benchmarks.zero.deepspeed_work import LENGTH, ROWS, architecture, rows_of_rank


def test_ranks_divide_the_tokens_of_a_step() -> None:
    batch = rows_of_rank(3, 0, 1, 1000)
    assert batch.shape == (ROWS, LENGTH)
    halves = [rows_of_rank(3, rank, 2, 1000) for rank in (0, 1)]
    assert torch.equal(torch.stack(halves, 1).flatten(0, 1), batch)
    assert not torch.equal(rows_of_rank(4, 0, 1, 1000), batch)
    assert architecture()["vocab_size"] == 50272


def test_a_run_has_the_largest_memory_and_the_median_step_after_warm_up() -> None:
    ranks = [
        {"seconds": [9.0, 9.0, 2.0, 4.0, 3.0], "losses": [1.0], "peak_bytes": 10},
        {"seconds": [9.0, 9.0, 2.0, 4.0, 3.0], "losses": [5.0], "peak_bytes": 30},
    ]
    run = summarize(ranks)
    assert (run.seconds, run.peak_bytes, run.losses) == (3.0, 30, [1.0])


def test_the_last_object_of_each_rank_is_returned_or_an_error_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = tmp_path / "printed_by_a_rank.py"
    program.write_text(
        "import os\nprint('a warning', '{\"early\": 1}', '{\"rank\": ' + os.environ['RANK'] + '}', sep='\\n')"
    )
    assert run_ranks(program.stem, [], 2) == [{"rank": 0}, {"rank": 1}]
    program.write_text("print('a warning')")
    with pytest.raises(BenchFailed, match="status 0, 0 objects"):
        run_ranks(program.stem, [], 1)
    program.write_text("print('{\"rank\": 2}')\nraise SystemExit('no memory')")
    with pytest.raises(BenchFailed, match=r"(?s)status 1, 1 objects:.*no memory"):
        run_ranks(program.stem, [], 1)
