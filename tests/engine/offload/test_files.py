"""Files of the NVMe tiers: reserved disk space, removal, and disk failures."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, host_memory
from engine.offload.scratch_file import ScratchFile
from engine.offload.states import BUFFERS, PAGE, States
from tests.engine.offload.test_tiers import TIERS, advance, engine_of

NVME, NVME_ALL = TIERS[1], TIERS[5] | {"zero_stage": 3}


def refuse(number: int) -> Any:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


def states_of(sizes: list[int], sub_group: int, *kinds: str, folder: Path | None = None) -> States:
    path = None if folder is None else str(folder)
    states = States(sizes, sub_group, torch.device("cpu"), nvme_path=path, is_nvme=folder is not None)
    for kind in kinds:
        states.add(kind)
    return states


def test_iterate_stores_changes_and_holds_a_few_sub_groups(tmp_path: Path) -> None:
    states = states_of([20 * PAGE, 17], PAGE, "parameter", "exp_avg", folder=tmp_path)
    for shard, size in enumerate(states.sizes):
        states.write("parameter", shard, torch.arange(size, dtype=torch.float32))
    for _ in range(2):
        for _, actual in states.iterate(states.sub_groups, ["parameter", "exp_avg"]):
            actual["exp_avg"].copy_(actual["parameter"])
            actual["parameter"].add_(1.0)
    assert torch.equal(states.shard("parameter", 0), torch.arange(20 * PAGE) + 2.0)
    assert torch.equal(states.shard("exp_avg", 1), torch.arange(17) + 1.0)
    assert states.buffer_bytes == BUFFERS * 2 * 4 * PAGE
    for _, actual in states.iterate(states.sub_groups, ["parameter"], store=False):
        actual["parameter"].zero_()
    assert torch.equal(states.shard("parameter", 1), torch.arange(17) + 2.0)


def test_a_file_has_no_name_and_frees_its_space(tmp_path: Path) -> None:
    file = ScratchFile(str(tmp_path), 2**20)
    descriptor = file.descriptor
    assert list(tmp_path.iterdir()) == [] and os.fstat(descriptor).st_nlink == 0
    assert os.fstat(descriptor).st_blocks * 512 >= 2**20
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_full_disk_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match=r"nvme_path=.* has no room for .* GiB") as actual:
        engine_of(NVME, nvme_path=str(tmp_path))
    assert actual.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"nvme_path=.*nowhere: cannot create a file"):
        engine_of(NVME, nvme_path=str(tmp_path / "nowhere"))


def test_a_write_that_fails_stops_the_run_and_the_last_checkpoint_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(NVME)
    advance(engine, 1, 2)
    engine.save(tmp_path / "last")
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", refuse(errno.EIO))
        with pytest.raises(OSError, match="offload file in") as actual:
            advance(engine, 3, 5)
    assert actual.value.errno == errno.EIO
    undisturbed, again = engine_of(NVME), engine_of(NVME, seed=9)
    advance(undisturbed, 1, 2)
    again.load(tmp_path / "last")
    assert advance(again, 3, 5) == advance(undisturbed, 3, 5)


def test_a_file_system_without_direct_io_uses_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = advance(engine_of(NVME), 1, 3)
    opened = os.open

    def no_direct(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        return refuse(errno.EINVAL)() if flags & os.O_DIRECT else opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_direct)
    assert advance(engine_of(NVME), 1, 3) == expected


def test_training_and_checkpoints_use_no_call_that_only_linux_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has none of these calls. A kernel without huge pages refuses the advice."""
    expected = advance(engine_of(NVME_ALL), 1, 3)
    for name in ("O_DIRECT", "fdatasync", "posix_fadvise", "posix_fallocate"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    monkeypatch.setattr(host_memory, "HUGE_PAGE", 1)
    first, second = engine_of(NVME_ALL), engine_of(NVME_ALL, seed=9)
    actual = advance(first, 1, 2)
    first.save(tmp_path / "step-2")
    second.load(tmp_path / "step-2")
    assert actual + advance(second, 3, 3) == expected


def test_parameters_are_read_ahead_and_a_failed_flush_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of({"offload_optimizer": "cpu", "offload_parameters": "nvme"}, zero_stage=3)
    parameters, ahead = engine._nvme_parameters, list[int]()
    assert parameters is not None
    read_ahead = parameters.file.read_ahead
    monkeypatch.setattr(parameters.file, "read_ahead", lambda *r: (ahead.append(r[0]), read_ahead(*r)))
    monkeypatch.setattr(os, "fdatasync", refuse(errno.EIO))
    advance(engine, 1, 1)
    starts = [start for start, _ in parameters._ranges]
    forward, backward = [2, 3, 3], [0, 1, 0]  # unit 0 is the root; two units are read ahead of each of three blocks
    assert ahead == [starts[unit] for unit in forward + backward]
    with pytest.raises(OSError, match="Input/output"):
        advance(engine, 2, 2)


def test_refused_combinations() -> None:
    with pytest.raises(ValueError, match="needs zero_stage=3"):
        EngineConfig(offload_parameters="nvme", zero_stage=2)
    with pytest.raises(ValueError, match="offload_ratio"):
        EngineConfig(offload_ratio=1.5)
    with pytest.raises(ValueError, match="needs offload_optimizer"):
        engine_of({"offload_parameters": "nvme"}, zero_stage=3)
