"""What ranks print when an error ends one of them: the error once, and everywhere else whose it was."""

import sys

import pytest
from torch.distributed import HashStore

from engine.parallel import rank_errors
from engine.parallel.rank_errors import LostMate, install

GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def ends(store: HashStore, rank: int, problem: BaseException, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let an exception end a rank; whether its traceback was printed, in the usual way."""
    printed = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "excepthook", lambda *told: printed.append(told))
        install(store, rank)
        sys.excepthook(type(problem), problem, None)
    return bool(printed)


def test_the_first_error_is_told_by_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rank_errors, "PATIENCE", 0.0)
    store = HashStore()
    assert ends(store, 3, GLOO, monkeypatch), "nobody has said why"
    assert ends(store, 2, KeyboardInterrupt(), monkeypatch)
    assert ends(store, 1, ValueError("a label of -3"), monkeypatch)
    assert capsys.readouterr().err == ""
    for rank, problem in ((0, GLOO), (2, LostMate("stopped"))):
        assert not ends(store, rank, problem, monkeypatch)
        assert capsys.readouterr().err == f"rank {rank} ends: rank 1 ended by ValueError: a label of -3\n"
    assert ends(store, 3, ValueError("an error of its own"), monkeypatch)
    assert not ends(store, 2, GLOO, monkeypatch)
    assert "a label of -3" in capsys.readouterr().err, "the first one counts"


class Gone(HashStore):
    """A store whose process is no more."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


def test_the_store_goes_with_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not ends(Gone(), 1, GLOO, monkeypatch)
    assert capsys.readouterr().err == "rank 1 ends: rank 0 ended, and what it said says why\n"
