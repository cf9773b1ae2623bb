"""A snapshot read by another thread keeps its values, whatever training does to the tensors meanwhile."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.checkpoint import snapshot
from engine.checkpoint.snapshot import Snapshot

NAMES = ("a", "b", "c")


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {name: torch.full((4,), float(at)) for at, name in enumerate(NAMES)}


def halves(kept: Snapshot, name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Two readings of one tensor, as a writer takes large ones."""
    for part in (slice(0, 2), slice(2, 4)):
        with kept.reading(name, tensor) as source:
            yield source[part].clone()


def test_what_is_read_before_a_change_is_not_copied(tensors: dict[str, Tensor]) -> None:
    kept = Snapshot(tensors)
    with kept.reading("a", tensors["a"]) as source:
        assert source is tensors["a"]
    kept.read("a")
    kept.complete()
    assert kept._copies.keys() == {"b", "c"}
    for tensor in tensors.values():
        tensor.fill_(9.0)
    with kept.reading("b", tensors["b"]) as source:
        assert source.tolist() == [1.0] * 4
    kept.keep_only({"c"})
    assert kept._copies.keys() == {"c"}
    kept.end()
    assert not kept._copies and not kept._live


def test_a_change_in_the_middle_of_a_tensor(tensors: dict[str, Tensor]) -> None:
    """Training waits for the part that is being read; the second part comes from the copy."""
    kept = Snapshot(tensors)
    inside, changed = threading.Event(), threading.Event()

    def training() -> None:
        inside.wait(10)
        kept.complete()
        for tensor in tensors.values():
            tensor.fill_(9.0)
        changed.set()

    thread = threading.Thread(target=training)
    thread.start()
    found = []
    for at, half in enumerate(halves(kept, "b", tensors["b"])):
        if at == 0:
            inside.set()
            assert not changed.wait(0.1)
        found.append(half)
    thread.join()
    assert torch.cat(found).tolist() == [1.0] * 4 and tensors["b"].tolist() == [9.0] * 4
    for name, wanted in (("a", 0.0), ("c", 2.0)):
        with kept.reading(name, tensors[name]) as source:
            assert source.tolist() == [wanted] * 4


def test_no_reading_while_a_copy_is_made(tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Snapshot(tensors)
    copying, go_on, copy = threading.Event(), threading.Event(), snapshot._copy

    def slow(tensor: Tensor) -> Tensor:
        copying.set()
        go_on.wait(10)
        return copy(tensor)

    monkeypatch.setattr(snapshot, "_copy", slow)

    def train() -> None:
        kept.complete()
        for tensor in tensors.values():
            tensor.fill_(9.0)

    training = threading.Thread(target=train)
    training.start()
    copying.wait(10)
    found: list[list[float]] = []
    reader = threading.Thread(target=lambda: found.append(next(halves(kept, "c", tensors["c"])).tolist()))
    reader.start()
    reader.join(0.1)
    assert not found  # "c" is copied first: it is read last
    go_on.set()
    training.join()
    reader.join()
    assert found == [[2.0, 2.0]]


def test_a_copy_that_finds_no_memory_leaves_the_reader_free(
    tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: Tensor) -> Tensor:
        raise MemoryError

    kept = Snapshot(tensors)
    monkeypatch.setattr(snapshot, "_copy", none_left)
    with pytest.raises(MemoryError):
        kept.complete()
    with kept.reading("c", tensors["c"]) as source:
        assert source.tolist() == [2.0] * 4


def test_what_changes_without_notice_is_copied_at_once(tensors: dict[str, Tensor]) -> None:
    tensors["turned"] = torch.arange(6.0).view(2, 3).t()
    kept = Snapshot(tensors, at_once={"a"})
    for tensor in tensors.values():
        tensor.fill_(9.0)
    for name, wanted in (("a", [0.0] * 4), ("turned", [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]), ("b", [9.0] * 4)):
        with kept.reading(name, tensors[name]) as source:
            assert source.flatten().tolist() == wanted
