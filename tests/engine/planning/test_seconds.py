"""Seconds under tensor, sequence, pipeline parallelism, against sums worked out by hand; a probe of narrow blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.memory import Workload, shape_of
from engine.memory.pieces import pieces_of
from engine.offload.direct_io import ScratchFile
from engine.parallel import dist
from engine.planning import Pace, Probe, probe, step_seconds
from engine.planning.probe import FILE_BYTES, _body, _disk
from tests.ranks import run_ranks

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64, "vocab_size": 96}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PROBE = Probe(
    forward=1e-5, backward=2e-5, decode=1e-3, head=1e-4, adam=1e-9, host_adam=4e-9, wire=1e-9, copy=1e-10, disk=1e-9,
    group_wire=1e-8,
)  # fmt: skip


def test_a_tensor_group_sums_inside_of_blocks() -> None:
    shape = shape_of(json.dumps(LLAMA), 2)
    work = Workload(ranks=1, dtype="fp32", micro_batch_tokens=100, checkpointing=True)
    found = step_seconds(shape, work, Pace(4, 100), PROBE, on_gpu=False)
    each = 32 * 4 * 1e-8  # one token's hidden states, once
    ahead = 4 * 400 * (1e-5 + 2 * each)
    assert found["train"] == pytest.approx(2 * ahead + 4 * 400 * (2e-5 + 2 * each) + 400 * (1e-4 + each))


def test_a_sequence_group_exchanges_inside_of_blocks() -> None:
    shape = shape_of(json.dumps(LLAMA))
    work = Workload(ranks=4, dtype="fp32", micro_batch_tokens=100, sequence=2)
    found = step_seconds(shape, work, Pace(4, 100), PROBE, on_gpu=False)
    each = 0.5 * (32 + 16 + 16 + 32) * 4 * 1e-8  # queries, keys and values of half the heads, what attention gives
    own = 2 * 100 // 2  # two sequences a group, and half of their tokens a rank
    wire = 2 * 0.5 * 4 * shape.parameters * 1e-9  # gradients, at stage 0
    assert found["train"] == pytest.approx(own * (4 * (3e-5 + 2 * each) + 1e-4) + wire)


def test_a_pipeline_takes_turns_of_its_slowest_piece() -> None:
    shape = shape_of(json.dumps(LLAMA | {"num_hidden_layers": 5}))
    work = Workload(ranks=1, dtype="fp32", micro_batch_tokens=100, pieces=2, step_tokens=400)
    probed = Probe(**(vars(PROBE) | {"group_wire": 0.0}))
    found = step_seconds(shape, work, Pace(4, 100), probed, on_gpu=False)
    last = 2 * 400 * 3e-5 + 400 * 1e-4  # the first has three blocks and no head
    assert found["train"] == pytest.approx(5 / 4 * (last + 400 * 32 * 4 * 1e-9))
    longer = Probe(**(vars(probed) | {"tokens": 150}))  # more than a micro-batch has
    assert step_seconds(shape, work, Pace(4, 100), longer, on_gpu=False)["train"] == pytest.approx(1.5 * found["train"])
    assert found["step"] == pytest.approx(max(piece.parameters for piece in pieces_of(shape, 2)) * 1e-9)


def test_the_disk_is_probed_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tiers read and write, all of it both ways, and nothing is left."""
    moved: list[tuple[str, int]] = []
    transfer = ScratchFile._transfer

    def counted(file: ScratchFile, move: Any, view: memoryview, offset: int) -> None:
        transfer(file, move, view, offset)
        moved.append((move.__name__, len(view)))

    monkeypatch.setattr(ScratchFile, "_transfer", counted)
    assert _disk(str(tmp_path)) > 0
    for way in ("pwritev", "preadv"):
        assert sum(size for name, size in moved if name == way) == FILE_BYTES
    assert not list(tmp_path.iterdir())


def probed() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    dist.arrange(tensor=2)
    narrow, whole = shape_of(json.dumps(LLAMA), 2), shape_of(json.dumps(LLAMA))
    found = probe(narrow, dtype="fp32", length=32, rows=2, generates=whole)
    held = [
        sum(p.numel() for p in _body(each, 2, "fp32", dist.world().device).parameters()) for each in (narrow, whole)
    ]
    return [vars(found), {"narrow": held[0], "whole": held[1]}]


def test_the_probe_runs_a_share_of_a_block() -> None:
    for seconds, held in run_ranks(probed, 2):
        assert all(seconds[name] > 0 for name in ("forward", "backward", "decode", "head", "group_wire"))
        embedding, norms = 96 * 32, 5 * 32
        assert held["narrow"] - embedding - norms == (held["whole"] - embedding - norms) / 2
