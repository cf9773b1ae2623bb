"""Two GPUs train and generate like one: NCCL's groups and collectives, and CUDA graphs that contain collectives.

    torchrun --standalone --nproc-per-node=2 -m tests.engine.test_on_two_gpus '{"zero_stage": 3}'

The command prints loss and gradient norm of some updates, and the tokens of two answers. GPU_TESTS_ON=cpu
uses two CPU ranks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, Sampling
from engine.engine import Engine
from engine.parallel import dist
from tests.engine.generation.families import build, ragged_prompts
from tests.engine.test_on_gpu import OPTIMIZER, Policy, batches
from tests.gpu import DEVICE, ON_GPU, needs_gpu

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in range(4)),
    {"zero_stage": 1, "shard_ranks": 1},
    {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    {"zero_stage": 0, "tensor_parallel": 2},
    {"zero_stage": 0, "pipeline_parallel": 2},
]


def run(ranks: int, layout: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what the command of this file prints for a layout."""
    launch = [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "tests.engine.test_on_two_gpus",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launch, json.dumps(layout)]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-5000:]
    printed: dict[str, list[Any]] = json.loads(finished.stdout.strip().splitlines()[-1])
    return printed


@pytest.fixture(scope="module")
def one_gpu() -> dict[str, list[Any]]:
    return run(1, {"zero_stage": 0})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_gpus_train_and_generate_like_one(layout: dict[str, Any], one_gpu: dict[str, list[Any]]) -> None:
    actual = run(2, layout)
    assert actual["numbers"] == pytest.approx(one_gpu["numbers"], rel=1e-3)
    assert actual["tokens"] == one_gpu["tokens"]


def negative(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return -module(ids)[0].sum(), {}


def main(layout: dict[str, Any]) -> None:
    dist.start("two-gpus", device=DEVICE.type)
    config = EngineConfig(dtype="fp32", **layout)
    engine = Engine(Policy(build("llama")), config, optimizer=OPTIMIZER, rollout_path="lm")
    world = dist.world()
    engine.flip.tensor_parallel = world.tensor
    own = [ids.to(world.device)[world.data_rank :: world.data_size] for ids in batches()]
    updates = [engine.update(list(ids.split(1)), negative, 4.0 * 19) for ids in own]
    with engine.generating() as rollouts:
        answers = rollouts.generate(ragged_prompts(3, 9), Sampling(9, temperature=0), [0, 1])
    if dist.is_rank_zero():
        numbers = [number for update in updates for number in (update.loss, update.grad_norm)]
        print(json.dumps({"numbers": numbers, "tokens": [answer.token_ids for answer in answers]}), flush=True)
    dist.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
