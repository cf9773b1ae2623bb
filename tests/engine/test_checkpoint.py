"""Checkpoints are complete or absent, resume on any number of ranks, and report errors of their background writes."""

import errno
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine import Checkpointer, Engine, EngineConfig, OptimizerConfig
from engine.checkpoint import Damaged, complete, random_state, restore_random_state, storage
from engine.checkpoint import checkpointer as checkpointer_module
from engine.checkpoint.storage import LocalChunks, Writer
from engine.config import LossScale, Precision, Tier
from engine.parallel import dist, dtensors
from tests.ranks import run_ranks

WIDTH, ROWS, STEPS = 6, 4, 5
TENSORS = "tensors-0.safetensors"
OPTIMIZER = OptimizerConfig(lr=0.05, total_steps=STEPS, warmup_steps=2, weight_decay=0.1)


class Net(nn.Module):
    """Two blocks and a head with sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def engine_of(stage: int, *, seed: int = 1, dtype: Precision = "fp32", loss_scale: LossScale | None = None) -> Engine:
    torch.manual_seed(seed)
    config = EngineConfig(zero_stage=stage, dtype=dtype, loss_scale=loss_scale or LossScale())
    engine = Engine(Net(), config, optimizer=OPTIMIZER)
    engine.start_averaging(0.7)
    return engine


def squared(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return module(x).square().sum(), {}


def advance(engine: Engine, first: int, last: int) -> dict[str, Tensor]:
    """Train the steps `first` to `last` with data seeded by the step. Return the weights and averages."""
    world = dist.world()
    for step in range(first, last + 1):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(world.device)
        engine.update([x[world.rank :: world.size]], squared, ROWS)
    return state_of(engine)


def state_of(engine: Engine) -> dict[str, Tensor]:
    results = {name: p.detach() for name, p in engine.module.named_parameters()}
    results |= {f"average.{name}": mean for name, mean in engine.average.tensors.items()}
    return {name: dtensors.full_tensor(tensor).cpu().clone() for name, tensor in results.items()}


def save_and_wait(engine: Engine, folder: Path, **mine: Any) -> Checkpointer:
    checkpointer = Checkpointer({"net": engine})
    checkpointer.save(folder, {"step": 2}, mine)
    checkpointer.wait()
    return checkpointer


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=tolerance, rtol=tolerance)


def on_two_ranks(theirs: Path, ours: Path, broken: Path) -> dict[str, Any]:
    """Resume from one rank's checkpoint, save one for one rank, save during collectives, and fail on one rank."""
    torch.set_num_threads(1)
    from_one_rank = engine_of(3, seed=9)
    shared, mine = Checkpointer({"net": from_one_rank}).load(theirs)
    resumed = advance(from_one_rank, 3, STEPS)
    engine = engine_of(3)
    advance(engine, 1, 2)
    checkpointer = Checkpointer({"net": engine})
    checkpointer.save(ours, {"step": 2}, {"rank": dist.world().rank})
    # The background write runs its own collectives, which must not mix with these.
    sums = {dist.sum_over_ranks(float(dist.world().rank)) for _ in range(300)}
    checkpointer.wait()
    if dist.world().rank == 1:
        dist.request_stop()
    wishes = [(dist.stop_requested(), dist.sum_over_ranks(1.0), dist.stop_requested())]
    again = engine_of(3, seed=9)
    _, own = Checkpointer({"net": again}).load(ours)
    dist.set_parallelism(tensor=2)
    _, in_group = Checkpointer({}).load(ours)
    dist.set_parallelism()
    continued = advance(again, 3, STEPS)
    through = advance(engine, 3, STEPS)
    shutil.copytree(ours, ours.with_name("other"), dirs_exist_ok=True) if dist.is_rank_zero() else None
    dist.barrier()
    if dist.is_rank_zero():
        overwrite(ours.with_name("other") / "tensors-1.safetensors")
    dist.barrier()
    with pytest.raises(TypeError, match="not JSON serializable"):
        engine.save(ours.with_name("not-json"), {"tensor": torch.ones(1)})
    return {
        "shared": shared,
        "mine": mine,
        "own": own,
        "in_group": in_group,
        "sums": sums,
        "wishes": wishes,
        "resumed": resumed,
        "continued": continued,
        "through": through,
        "damaged": damage_seen(again, ours.with_name("other")),
        "error": failing_on_rank_one(engine, broken),
        "left": [p.name for p in complete(broken.parent)],
        "no folder": save_under(engine, ours / "state.json"),
    }


def save_under(engine: Engine, file: Path) -> str:
    """Save into a folder below a file. Only rank 0 creates the folder, so only rank 0 fails."""
    try:
        engine.save(file / "step-4")
    except OSError as error:
        return str(error)
    return "no error"


def overwrite(path: Path) -> None:
    """Change one byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def damage_seen(engine: Engine, folder: Path) -> str:
    before = state_of(engine)
    try:
        engine.load(folder)
    except Damaged as problem:
        assert_equal(state_of(engine), before)
        return problem.reason
    return "none"


def failing_on_rank_one(engine: Engine, folder: Path) -> str:
    if dist.world().rank == 1:
        Writer.write_data = full  # type: ignore[method-assign]
    try:
        save_and_wait(engine, folder)
    except OSError as error:
        return str(error)
    return "no error"


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_folder(path: Path, target: Path, rename: Any = Path.rename) -> None:
    full() if path.is_dir() else rename(path, target)


def test_one_and_two_ranks_exchange_checkpoints(tmp_path: Path) -> None:
    engine = engine_of(3)
    advance(engine, 1, 2)
    save_and_wait(engine, tmp_path / "one" / "step-2", rank=0)
    through = advance(engine, 3, STEPS)
    results = run_ranks(
        on_two_ranks, 2, tmp_path / "one" / "step-2", tmp_path / "two" / "step-2", tmp_path / "two" / "step-3"
    )
    for rank, result in enumerate(results):
        assert result["shared"] == {"step": 2}
        assert result["mine"] is None and result["own"] == {"rank": rank}
        assert result["in_group"] is None  # the ranks of a tensor group need equal random states
        assert result["sums"] == {1.0}
        assert result["wishes"] == [(False, 2.0, True)]
        assert_equal(result["resumed"], through, 1e-6)
        assert_equal(result["through"], through, 1e-6)
        assert_equal(result["continued"], result["through"])
        assert result["damaged"] == "tensors-1.safetensors has other bytes than were written"
        assert "No space left" in result["error"]
        assert result["left"] == ["step-2"]
        assert "Not a directory" in result["no folder"]
    single = engine_of(0, seed=9)
    Checkpointer({"net": single}).load(tmp_path / "two" / "step-2")
    assert_equal(advance(single, 3, STEPS), through, 1e-6)


def test_a_resumed_engine_has_all_state(tmp_path: Path) -> None:
    """Steps, Adam's counts, loss scale and moments are restored bit for bit."""
    engine = engine_of(0, dtype="fp16")
    engine.scaler.scale, engine.scaler.budget, engine.scaler.last_overflow = 512.0, 1, 1
    advance(engine, 1, 3)
    save_and_wait(engine, tmp_path / "step-3")
    fresh = engine_of(2, seed=9, dtype="fp16")
    Checkpointer({"net": fresh}).load(tmp_path / "step-3")
    assert fresh.step_count == 3 and fresh.scaler.state() == engine.scaler.state()
    assert engine.optimizer is not None and fresh.optimizer is not None
    for ours, theirs in zip(fresh.optimizer.state.values(), engine.optimizer.state.values(), strict=True):
        assert ours["step"].item() == theirs["step"].item() == 3
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(dtensors.local(ours[moment]), dtensors.local(theirs[moment]))
    assert_equal(advance(fresh, 4, STEPS), advance(engine, 4, STEPS))


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_checkpoint_after_a_forward_has_masters_and_states(tier: Tier, tmp_path: Path) -> None:
    """A forward leaves parameters in compute precision in the module; a checkpoint has those of the optimizer."""
    config = EngineConfig(zero_stage=2, dtype="bf16", offload_optimizer=tier)
    engine, other = (Engine(Net(), config, optimizer=OPTIMIZER) for _ in range(2))
    advance(engine, 1, 2)
    with torch.no_grad():
        engine(torch.ones(1, WIDTH))
        other(torch.ones(1, WIDTH))
    save_and_wait(engine, tmp_path / "step-2")
    Checkpointer({"net": other}).load(tmp_path / "step-2")
    assert_equal(advance(other, 3, STEPS), advance(engine, 3, STEPS))


def test_training_continues_while_the_old_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(0)
    before = advance(engine, 1, 2)
    write, begun, may_go_on = Writer.write_data, threading.Event(), threading.Event()
    monkeypatch.setattr(Writer, "write_data", lambda *a: (begun.set(), may_go_on.wait(60), write(*a))[2])
    checkpointer = Checkpointer({"net": engine})
    checkpointer.save(tmp_path / "step-2", {})
    advance(engine, 3, STEPS)
    assert begun.wait(60) and complete(tmp_path) == [] and (tmp_path / "step-2.tmp").exists()
    may_go_on.set()
    checkpointer.wait()
    assert [p.name for p in complete(tmp_path)] == ["step-2"]
    fresh = engine_of(0, seed=9)
    Checkpointer({"net": fresh}).load(tmp_path / "step-2")
    assert_equal(state_of(fresh), before)


def refuse(*_: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("where", ["write_data", "finish", "rename", "safetensors"])
def test_a_failed_write_raises_and_keeps_the_older_checkpoint(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(0)
    checkpointer = save_and_wait(engine, tmp_path / "step-1")
    if where == "rename":
        monkeypatch.setattr(Path, "rename", full_folder)
    elif where == "safetensors":
        monkeypatch.setattr(storage, "save_file", refuse)
    else:
        monkeypatch.setattr(Writer, where, full)
    checkpointer.save(tmp_path / "step-2", {})
    with pytest.raises(OSError, match=r"could not be written: No space left on device$") as error:
        checkpointer.wait()
    assert error.value.errno == errno.ENOSPC
    checkpointer.wait()  # the error is raised only once
    assert [p.name for p in complete(tmp_path)] == ["step-1"]
    monkeypatch.undo()
    checkpointer.save(tmp_path / "step-2", {})
    checkpointer.wait()
    assert [p.name for p in complete(tmp_path)] == ["step-1", "step-2"]


def test_incomplete_checkpoints_are_ignored_and_order_is_numeric(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-11.damaged", "step-12.tmp"):
        (tmp_path / name).mkdir()
    assert [p.name for p in complete(tmp_path)] == ["step-9", "step-10"]
    assert complete(tmp_path / "nowhere") == []


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "overwritten": (lambda f: overwrite(f / TENSORS), f"{TENSORS} has other bytes than were written"),
    "shortened": (lambda f: (f / TENSORS).write_bytes(b"short"), f"{TENSORS} has 5 bytes, was written with"),
    "lost": (lambda f: (f / TENSORS).unlink(), f"{TENSORS} is missing"),
    "values": (lambda f: (f / "state.json").write_text("{garbage"), "state.json has 8 bytes"),
    "values overwritten": (lambda f: overwrite(f / "state.json"), "state.json has other bytes"),
    "sums": (lambda f: (f / "checksums.json").write_text("[1]"), "checksums.json cannot be read"),
    "no list": (lambda f: (f / "checksums.json").write_text("{}"), "checksums.json has no checksum of rank-0.json"),
    "no sums": (lambda f: (f / "checksums.json").unlink(), "checksums.json is missing"),
    "folder": (shutil.rmtree, "there is no such folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage: str, tmp_path: Path) -> None:
    save_and_wait(engine_of(0), tmp_path / "step-1")
    harm, reason = DAMAGES[damage]
    harm(tmp_path / "step-1")
    assert damage_seen(engine_of(0, seed=9), tmp_path / "step-1").startswith(reason)


def test_the_callback_after_a_save_finds_the_final_folder(tmp_path: Path) -> None:
    results: list[list[Path]] = []
    checkpointer = Checkpointer({"net": engine_of(0)})
    checkpointer.save(tmp_path / "step-1", {}, then=lambda: results.append(complete(tmp_path)))
    checkpointer.wait()
    assert results == [[tmp_path / "step-1"]]


def test_random_state_comes_back() -> None:
    torch.manual_seed(4)
    kept = json.loads(json.dumps(random_state()))
    drawn = torch.rand(3)
    torch.rand(100)
    restore_random_state(kept)
    assert torch.equal(torch.rand(3), drawn)


def test_averaged_weights_are_swapped_in_and_out_exactly(tmp_path: Path) -> None:
    engine = engine_of(0)
    start = state_of(engine)
    sums = {name: torch.zeros_like(p.double()) for name, p in start.items() if not name.startswith("average.")}
    assert all(torch.equal(start[f"average.{name}"], start[name]) for name in sums)
    for step in range(1, 4):
        after = advance(engine, step, step)
        sums = {name: 0.7 * value + 0.3 * after[name].double() for name, value in sums.items()}
    mean = {name: value / (1 - 0.7**3) for name, value in sums.items()}
    live = state_of(engine)
    x = torch.ones(1, WIDTH, device=dist.world().device)
    plain = engine(x).detach().clone()
    with engine.averaged():
        inside = {name: dtensors.full_tensor(p.detach()).cpu().clone() for name, p in engine.module.named_parameters()}
        assert not torch.equal(engine(x), plain)
        with pytest.raises(ValueError, match="would store the average as the parameters"):
            engine.save(tmp_path / "checkpoint")
    for name, value in mean.items():
        torch.testing.assert_close(inside[name], value.float(), atol=1e-6, rtol=1e-5)
    assert_equal(state_of(engine), live)
    assert torch.equal(engine(x), plain)


def test_without_host_memory_for_a_copy_the_write_blocks_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointer_module, "COPY_SHARE", 0.0)
    monkeypatch.setattr(LocalChunks, "copy_to_host", lambda *_: pytest.fail("made a copy"))
    engine = engine_of(0)
    expected = advance(engine, 0, 1)
    checkpointer = Checkpointer({"net": engine})
    for step in (1, 2):
        checkpointer.save(tmp_path / f"step-{step}", {})
        assert complete(tmp_path)[-1] == tmp_path / f"step-{step}"
    assert len([line for line in caplog.messages if "training waits while it is written" in line]) == 1
    other = engine_of(0, seed=2)
    Checkpointer({"net": other}).load(tmp_path / "step-2")
    assert_equal(state_of(other), expected)
    monkeypatch.setattr(Writer, "write_data", full)
    checkpointer.save(tmp_path / "step-3", {"step": 3})
    with pytest.raises(OSError, match="could not be written") as caught:
        checkpointer.wait()
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in complete(tmp_path)] == ["step-1", "step-2"]


def test_tensors_are_plain_safetensors(tmp_path: Path) -> None:
    """safetensors reads the weights without zerochat, and no file is a pickle."""
    engine = engine_of(0, dtype="bf16")
    advance(engine, 1, 1)
    save_and_wait(engine, tmp_path / "step-1")
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    assert names == {TENSORS, "rank-0.json", "state.json", "checksums.json"}
    tensors = load_file(tmp_path / "step-1" / TENSORS)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(tensors[f"net.parameter.{name}"], dtensors.local(parameter.detach()))


def test_large_states_are_split_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FILE_BYTES", 500)
    engine = engine_of(0)
    expected = advance(engine, 1, 2)
    save_and_wait(engine, tmp_path / "step-2")
    sizes = [path.stat().st_size for path in (tmp_path / "step-2").glob("tensors-0*.safetensors")]
    assert len(sizes) > 3
    other = engine_of(0, seed=9)
    Checkpointer({"net": other}).load(tmp_path / "step-2")
    assert_equal(state_of(other), expected)


def test_buffers_of_any_type_and_shape_are_restored(tmp_path: Path) -> None:
    """Empty, scalar and transposed buffers, and bool and float8 after wider types."""
    values = {
        "number": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "narrow": torch.ones(3).to(torch.float8_e4m3fn),
        "wide": torch.arange(4, dtype=torch.float64),
    }

    def engine_with(tensors: dict[str, Tensor]) -> Engine:
        module = Net()
        for name, value in tensors.items():
            module.register_buffer(name, value)
        return Engine(module, EngineConfig(dtype="fp32"), optimizer=OPTIMIZER)

    save_and_wait(engine_with({name: value.clone() for name, value in values.items()}), tmp_path / "step-1")
    other = engine_with({name: torch.zeros_like(value) for name, value in values.items()})
    Checkpointer({"net": other}).load(tmp_path / "step-1")
    for name, value in values.items():
        actual = other.module.get_buffer(name)
        assert actual.dtype == value.dtype and actual.tolist() == value.tolist(), name


def test_a_save_replaces_a_checkpoint_but_no_other_files(tmp_path: Path) -> None:
    engine = engine_of(0)
    for _ in range(2):
        engine.save(tmp_path / "saved")
    (tmp_path / "saved" / "train.log").write_text("step 1")
    with pytest.raises(OSError, match=r"saved has other files \(train.log\), which the checkpoint would replace"):
        engine.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "train.log").read_text() == "step 1"
    engine.load(tmp_path / "saved")


@pytest.mark.parametrize("name", [".", "", "./", "here"])
def test_a_save_does_not_replace_the_current_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, here = engine_of(0), tmp_path / "here"
    folder = here if name == "here" else name
    engine.save(here)
    monkeypatch.chdir(here)
    with pytest.raises(FileExistsError, match=r"is the current folder, .* Use a new folder, such as \S*/checkpoint"):
        engine.save(folder)
    engine.save("checkpoint")
    engine.load("checkpoint")
    engine.load(folder)
