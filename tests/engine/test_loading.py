"""Weights read from safetensors folders in slices, and random weights from a seed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.loading import (
    SafetensorsFolder,
    initialize_parameters,
    read_parameters,
    read_region,
)
from engine.parallel import dtensors
from tests.ranks import run_ranks

TENSORS = {"w": torch.arange(20.0).reshape(5, 4), "b": torch.arange(5.0), "s": torch.tensor(3.0)}


@pytest.fixture(params=["one file", "index"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> SafetensorsFolder:
    if request.param == "one file":
        save_file(TENSORS, tmp_path / "model.safetensors")
        return SafetensorsFolder(tmp_path)
    files = {"w": "part-1.safetensors", "b": "part-2.safetensors", "s": "part-2.safetensors"}
    for file in set(files.values()):
        save_file({name: TENSORS[name] for name in files if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return SafetensorsFolder(tmp_path)


def test_names_shapes_and_rows(folder: SafetensorsFolder) -> None:
    assert sorted(folder.shapes) == ["b", "s", "w"]
    assert folder.shapes["w"] == (5, 4) and folder.shapes["s"] == ()
    assert torch.equal(folder.read("w", ((slice(1, 3),), (slice(4),))), TENSORS["w"][1:3])
    assert torch.equal(folder.read("w", ((slice(None),), (slice(None),))), TENSORS["w"])
    assert torch.equal(folder.read("s", ()), TENSORS["s"])
    inner, outer = folder.read("w", ((slice(5),), (slice(0, 1), slice(2, 4)))), TENSORS["w"]
    assert torch.equal(inner, torch.cat([outer[:, 0:1], outer[:, 2:4]], 1))


def test_parameters_are_filled_in_their_own_precision(folder: SafetensorsFolder) -> None:
    weight, scalar = torch.zeros(5, 4, dtype=torch.bfloat16), torch.zeros(())
    read_parameters({"mine.w": weight, "mine.s": scalar}, folder, {"mine.w": "w", "mine.s": "s"})
    assert torch.equal(weight.float(), TENSORS["w"]) and scalar.item() == 3


def test_another_shape_is_refused_with_both_shapes(folder: SafetensorsFolder) -> None:
    with pytest.raises(ValueError, match=r"w has shape \(5, 4\), the model wants \(4, 5\).*config.json"):
        read_parameters({"w": torch.zeros(4, 5)}, folder, {"w": "w"})


def test_a_region_over_two_tensors_is_sliced_in_all_dimensions() -> None:
    full = torch.arange(120).reshape(2, 6, 10)
    region = ((slice(1, 2),), (slice(0, 2), slice(3, 5)), (slice(4, 9),))
    assert torch.equal(read_region(full, region), full[1:2, [0, 1, 3, 4], 4:9])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"inner": nn.Linear(4, 4)}))


def normal(module: nn.Module, name: str) -> None:
    assert isinstance(module, nn.Linear) and torch.count_nonzero(module.weight) == 0
    nn.init.normal_(module.weight)


def drawn(seed: int, *names: str) -> dict[str, torch.Tensor]:
    module = net()
    for parameter in module.parameters():
        parameter.data.fill_(9.0)
    initialize_parameters(module, names, seed, normal)
    return {name: p.detach() for name, p in module.named_parameters()}


def test_random_weights_depend_only_on_seed_and_name() -> None:
    both = drawn(1, "0.weight", "0.bias", "1.inner.weight")
    single = drawn(1, "1.inner.weight")
    module, state = net(), torch.get_rng_state()
    initialize_parameters(module, ["0.weight"], 1, lambda layer, _: nn.init.normal_(layer.weight))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(single["1.inner.weight"], both["1.inner.weight"])
    assert not torch.equal(both["0.weight"], both["1.inner.weight"])
    assert not torch.equal(both["0.weight"], drawn(2, "0.weight")["0.weight"])
    assert both["0.bias"].abs().max() == 0 and both["1.inner.bias"].min() == 9  # 1.inner.bias was not initialized
    assert single["0.weight"].min() == 9


def test_random_weights_do_not_seed_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on a GPU would have equal masks on all ranks, whose seeds differ."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    drawn(1, "0.weight")
    assert not seeds


def test_sharded_modules_are_filled_in_place() -> None:
    engine = Engine(
        net(),
        EngineConfig(zero_stage=3, dtype="fp32"),
        optimizer=OptimizerConfig(lr=1.0, total_steps=1),
        fill=lambda module: initialize_parameters(module, ["0.weight"], 1, normal),
    )
    full = dtensors.full_tensor(dict(engine.module.named_parameters())["0.weight"].detach()).cpu()
    assert torch.equal(full, drawn(1, "0.weight")["0.weight"])


def read_damaged_rows(path: Path) -> str:
    folder = SafetensorsFolder(path)
    with pytest.raises(ValueError) as raised:
        Engine(
            nn.Linear(4, 4, bias=False),
            EngineConfig(zero_stage=3, dtype="fp32"),
            fill=lambda module: read_parameters(dict(module.named_parameters()), folder, {"weight": "w"}),
        )
    return str(raised.value)


def test_all_ranks_raise_if_one_reads_a_damaged_slice(tmp_path: Path) -> None:
    weight = torch.ones(4, 4)
    weight[3] = torch.nan  # in the rows of the second rank
    save_file({"w": weight}, tmp_path / "model.safetensors")
    first, second = run_ranks(read_damaged_rows, 2, tmp_path)
    assert first == second and "NaN or infinite values in 1 of 1 tensors (w)" in first


class Scaled(nn.Module):
    """A block with a direct parameter, whose class needs an argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


def test_a_unit_with_direct_parameters_is_filled() -> None:
    engine = Engine(
        nn.Sequential(nn.ModuleList([Scaled(4)])),
        EngineConfig(zero_stage=3, dtype="fp32", offload_optimizer="cpu"),  # offload uses FSDP2 on one rank, too
        optimizer=OptimizerConfig(lr=1.0),
        fill=lambda module: initialize_parameters(
            module, ["0.0.scale"], 1, lambda unit, _: nn.init.constant_(unit.scale, 5)
        ),
    )
    assert dtensors.full_tensor(next(engine.module.parameters()).detach()).tolist() == [5.0] * 4
