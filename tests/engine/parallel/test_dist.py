"""The rank that fails first prints its traceback; the other ranks print its error."""

import sys

import pytest
from torch.distributed import DistError, HashStore

from engine.parallel import dist

GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def ends(store: HashStore, rank: int, problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let an exception end a rank; return whether its traceback was printed."""
    printed = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "excepthook", lambda *error: printed.append(error))
        dist.print_first_error(store, rank)
        sys.excepthook(type(problem), problem, None)
    return bool(printed)


def test_all_ranks_print_the_first_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dist, "FIRST_ERROR_WAIT", 0.0)
    store = HashStore()
    assert ends(store, 3, GLOO, monkeypatch), "no rank has written an error"
    assert ends(store, 2, KeyboardInterrupt(), monkeypatch)
    assert ends(store, 1, ValueError("a label of -3"), monkeypatch)
    assert capsys.readouterr().err == ""
    for rank, problem in ((0, GLOO), (2, DistError("stopped"))):
        assert not ends(store, rank, problem, monkeypatch)
        assert capsys.readouterr().err == f"rank {rank} ends: rank 1 ended by ValueError: a label of -3\n"
    assert ends(store, 3, ValueError("an error of its own"), monkeypatch)
    assert not ends(store, 2, GLOO, monkeypatch)
    assert "a label of -3" in capsys.readouterr().err, "the first error counts"


class Gone(HashStore):
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


def test_the_store_ends_with_rank_zero(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not ends(Gone(), 1, GLOO, monkeypatch)
    assert capsys.readouterr().err == "rank 1 ends: rank 0 ended. Its output has the reason\n"
