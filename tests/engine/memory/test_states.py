"""Predicted model states against the bytes of the tensors that live in an engine, each stage, one and two ranks."""

import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine import EngineConfig, OptimizerConfig
from engine.engine import Engine
from engine.memory import ModelStates, frozen_states, model_states
from engine.parallel import dist, zero
from tests.ranks import run_ranks

WIDTH = 160
CASES = [(stage, dtype, "") for stage in range(4) for dtype in ("fp32", "bf16")]
CASES += [(2, "bf16", "lean"), (0, "bf16", "errors")]


class Block(nn.Module):
    """Four matrices."""

    heights: list[int] | None = None

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.maps = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.maps:
            x = x @ weight
        if Block.heights is not None and self.last:
            Block.heights.append(settled())
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(last=place == 5) for place in range(6))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def living() -> int:
    """Bytes of all tensors' storages, each once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if isinstance(found, Tensor) and type(found).__name__ != "FakeTensor":
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu":
                    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                    sizes[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(sizes.values())


def settled() -> int:
    """`living` once four readings agree: Gloo's threads let go of the last gathers' buffers a little later."""
    readings = [living()]
    while (dist.world().size > 1 and len(readings) < 4) or len(set(readings[-4:])) > 1:
        time.sleep(0.03)
        readings.append(living())
    return readings[-1]


def config_of(stage: int, dtype: str, special: str) -> tuple[EngineConfig, OptimizerConfig]:
    """`lean` are bf16 states, `errors` 1-bit Adam's."""
    states = "bf16" if special == "lean" else "fp32"
    name = "onebitadam" if special == "errors" else "adamw"
    return EngineConfig(zero_stage=stage, dtype=dtype, states=states), OptimizerConfig(lr=1e-3, name=name)  # type: ignore[arg-type]


def held(stage: int, dtype: str, special: str) -> dict[str, int]:
    """Bytes between steps, in the forward of a second micro-batch, after its backward; and of a frozen engine."""
    dist.barrier()
    before = settled()
    config, optimizer = config_of(stage, dtype, special)
    engine = Engine(Net(), config, optimizer=optimizer)
    x = torch.randn(1, WIDTH)
    found: dict[str, int] = {}
    for last in (False, True):
        Block.heights = []
        loss = engine(x).float().square().sum()
        found["forward"] = max(Block.heights) - before
        Block.heights = None
        engine.backward(loss, last=last)
        del loss
    dist.barrier()
    found["backward"] = settled() - before
    engine.step()
    dist.barrier()
    found["resting"] = settled() - before
    del engine
    dist.barrier()
    before = settled()
    frozen = Engine(Net(), EngineConfig(zero_stage=stage, dtype=dtype))  # type: ignore[arg-type]
    with frozen.scoring() as module:
        Block.heights = []
        module(x.to(torch.bfloat16) if dtype == "bf16" else x)
        found["scoring"] = max(Block.heights) - before
        Block.heights = None
    found["frozen"] = settled() - before
    return found


def held_all() -> list[dict[str, int]]:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is there already need not be looked at again and again
    try:
        return [held(*case) for case in CASES]
    finally:
        gc.unfreeze()


def check(ranks: int, measured: list[dict[str, int]]) -> None:
    net = Net()
    total = sum(p.numel() for p in net.parameters())
    block = sum(p.numel() for p in zero.units(net)[0].parameters())
    sizes: dict[str, Any] = {"root": total - 6 * block, "block": block, "ranks": ranks}
    for (stage, dtype, special), found in zip(CASES, measured, strict=True):
        lean, errors = special == "lean", special == "errors"
        config, _ = config_of(stage, dtype, special)
        states = model_states(total, config=config, has_error_feedback=errors, **sizes)
        frozen = frozen_states(total, config=EngineConfig(zero_stage=stage, dtype=dtype), **sizes)  # type: ignore[arg-type]
        shards = 1 if stage == 0 else ranks
        where = f"stage {stage} {dtype} {special} {ranks} ranks: {found}"
        assert found["resting"] == pytest.approx(states.resting, rel=0.05), where
        assert found["backward"] == pytest.approx(states.resting + (2 if lean else 4) * total / shards, rel=0.05), where
        assert found["forward"] == pytest.approx(states.resting + states.gathered + states.gradients, rel=0.05), where
        # The gather of the next block may or may not be in flight; without a backward the last one's buffer stays.
        slack = block * (4 if dtype == "fp32" else 2) * 1.05
        assert found["frozen"] == pytest.approx(frozen.resting, abs=slack), where
        assert found["scoring"] == pytest.approx(frozen.resting + frozen.gathered, abs=slack), where


def test_one_rank_holds_what_is_predicted() -> None:
    check(1, held_all())


def test_two_ranks_hold_what_is_predicted() -> None:
    for measured in run_ranks(held_all, 2):
        check(2, measured)


def states_of(engine: dict[str, Any], **keys: Any) -> ModelStates:
    """A million parameters on four ranks."""
    sizes = {"root": 100_000, "block": 300_000, "ranks": 4}
    return model_states(1_000_000, config=EngineConfig(**engine), **sizes, **keys)


def test_optimizer_adapters_and_offload() -> None:
    adam = states_of({"zero_stage": 2})
    assert (adam.parameters, adam.optimizer, adam.gathered, adam.gradients) == (10**6, 2 * 10**6, 2 * 10**6, 10**6)
    assert states_of({"zero_stage": 2}, moments=1).optimizer == 10**6
    lora = states_of({"zero_stage": 2}, trained=10_000)
    assert (lora.parameters, lora.optimizer, lora.gradients) == (10**6, 20_000, 10_000)
    host = states_of({"zero_stage": 3, "offload_parameters": "cpu"})
    assert (host.resting, host.host, host.gathered) == (0, 4 * 10**6, 1_400_000)
    offloaded = states_of({"zero_stage": 2, "offload_optimizer": "cpu"})
    assert (offloaded.resting, offloaded.gradients) == (500_000, 0)
    assert (offloaded.host, offloaded.nvme) == (250_000 * (4 + 8 + 4), 0)
    in_files = {"zero_stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme", "sub_group_size": 10_000}
    files = states_of(in_files)
    assert (files.resting, files.host, files.nvme) == (0, 250_000 * 4 + 4 * 10_000 * 12, 250_000 * 14)
    half = states_of({"zero_stage": 2, "offload_optimizer": "cpu", "offload_ratio": 0.6})
    assert (half.resting, half.gradients, half.host) == (500_000 + 100_000 * 12, 400_000, 150_000 * 16)
    short = states_of({"zero_stage": 1, "offload_optimizer": "cpu", "sub_group_size": 100_000})
    assert short.host == 250_000 * (2 + 4 + 8) + 4 * 100_000  # a step casts the gradients of a sub-group to fp32
    last = states_of({"zero_stage": 1}, accumulates=False)
    assert last.gathered + last.gradients - last.overlap == 2 * 10**6  # copies are freed as gradients come
