"""What `-m gpu` leaves out, on the pretended device: checkpoints, memory that runs out, states that are parked, blocks
that are streamed. tests/engine/test_pretended_gpu.py runs it.
"""

import gc
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Checkpointer, EngineConfig, Sampling
from engine.checkpoint import checkpointer
from engine.checkpoint.storage import chunks_of
from engine.engine import Engine
from engine.generation import attention
from engine.generation.attention import Step
from engine.generation.decode_step import SlotModel
from engine.generation.generator import Generator
from engine.generation.kv_cache import CacheSize, KVCache
from engine.generation.scheduler import Chunk
from engine.loading import copy_local
from engine.oom import find_micro_batch_size
from tests.engine.generation.families import build
from tests.engine.test_on_gpu import OPTIMIZER, Policy, batches, loss
from tests.gpu import lone_rank, needs_gpu  # noqa: F401  a fixture
from tests.pretended_gpu import cuda

pytestmark = [*needs_gpu, pytest.mark.usefixtures("lone_rank")]


def engine_of(family: str, **layout: Any) -> Engine:
    config = EngineConfig(dtype="fp32", **layout)
    return Engine(Policy(build(family)), config, optimizer=OPTIMIZER, rollout_path="lm")


def advance(engine: Engine, some: Sequence[Tensor], micro: int = 4) -> list[float]:
    return [engine.update(list(ids.split(micro)), loss, ids[:, 1:].numel()).loss for ids in some]


# The tiers with the share of the free memory that a copy may take: one half copies all, zero writes all in place.
TIERS: list[tuple[dict[str, Any], float]] = [
    ({"zero_stage": 2}, 0.5),
    ({"zero_stage": 2}, 0.0),
    ({"zero_stage": 3, "offload_optimizer": "cpu", "offload_ratio": 0.5}, 0.0),
    ({"zero_stage": 3, "offload_optimizer": "nvme"}, 0.5),
]


@pytest.mark.parametrize(("layout", "copy_share"), TIERS, ids=str)
def test_a_checkpoint_goes_on_as_it_was(
    layout: dict[str, Any], copy_share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written while training continues, from memory of the device, of the host, and from files."""
    monkeypatch.setattr(checkpointer, "COPY_SHARE", copy_share)
    engine, following = engine_of("opt", **layout), engine_of("opt", **layout)
    for each in (engine, following):
        each.start_averaging(0.9)
    advance(engine, batches()[:2])
    saving = Checkpointer({"engine": engine})
    saving.save(tmp_path / "step-2", {})
    expected = advance(engine, batches()[2:])
    saving.wait()
    Checkpointer({"engine": following}).load(tmp_path / "step-2")
    assert advance(following, batches()[2:]) == expected


def test_a_copy_is_made_before_anything_changes() -> None:
    live = torch.arange(2500.0).to("cuda")
    copy = chunks_of(live).copy_to_host().values
    torch.cuda.synchronize()
    live.fill_(9.0)
    assert copy.device.type == "cpu" and copy.is_pinned()
    assert torch.equal(copy, torch.arange(2500.0))


def test_tied_weights_that_are_filled_later_stay_on_the_host() -> None:
    """A model without memory yet, as a stage builds it: the head that is the embedding comes by a second time."""
    whole = Policy(build("opt"))
    values = {name: p.detach().clone() for name, p in whole.named_parameters()}

    def fill(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            copy_local(parameter, values[name])

    whole.to("meta").lm.tie_weights()  # type: ignore[operator]
    config = EngineConfig(zero_stage=3, dtype="fp32", offload_optimizer="cpu", offload_parameters="cpu")
    engine = Engine(whole, config, optimizer=OPTIMIZER, fill=fill)
    assert advance(engine, batches()) == pytest.approx(advance(engine_of("opt", zero_stage=3), batches()), rel=1e-4)


def test_micro_batches_are_summed_on_the_host() -> None:
    """Gradients arrive there in pinned memory while backward continues, also those of shards on the host."""
    expected = advance(engine_of("llama", zero_stage=2), batches()[:2], micro=2)
    waits = []
    layouts: list[dict[str, Any]] = [{"zero_stage": 2}, {"zero_stage": 3, "offload_parameters": "cpu"}]
    for shards in layouts:
        engine = engine_of("llama", **shards, offload_optimizer="cpu")
        cuda.waits()
        found = advance(engine, batches()[:2], micro=2)
        waits.append(Counter(cuda.waits()))
        assert found == pytest.approx(expected, rel=1e-4)
    assert waits[0] == waits[1]


@pytest.mark.parametrize("window", [None, 4])
def test_prompts_attend_in_one_call(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that begin prompts, and one that continues, as when each attends by a call of its own."""
    tokens, module = torch.randn(3, 14, 4, 16, device="cuda", dtype=torch.bfloat16), SimpleNamespace(layer_idx=0)
    chunks = [Chunk(1, [0] * 6, 0), Chunk(2, [0] * 2, 3), Chunk(0, [0] * 5, 0), Chunk(3, [0], 0)]
    query, key, value = (t.transpose(0, 1)[None] for t in tokens)
    heads = query, key[:, :2], value[:, :2]
    found = []
    for one_by_one in (False, True):
        cache = KVCache(CacheSize(4, 8, 2, 8), query.device)
        cache.layer(0, *heads[1:]).prompt_keys.fill_(0.5)
        if one_by_one:
            monkeypatch.setattr(attention, "varlen_kernel", lambda: None)
        step = Step(cache, None, chunks)
        out, _ = attention.slot_attention(module, *heads, step=step, sliding_window=window)  # type: ignore[arg-type]
        found.append(out)
        assert ("chunk_bounds" in vars(step)) != one_by_one
    torch.testing.assert_close(found[0].cpu(), found[1].cpu(), atol=2e-2, rtol=2e-2)


def negative(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return -module(ids)[0].sum(), {}


def test_the_micro_batch_size_that_fits_is_found() -> None:
    """The dry run of all rows needs too much, half of them fit; the update afterwards is the one of all rows."""
    ids = batches()[0].repeat(4, 1)
    losses, needed = [], 0
    for limited in (False, True):
        engine = engine_of("opt", zero_stage=2)
        engine.update([ids[:1]], negative, 19)
        gc.collect()
        before = cuda.allocated()
        torch.cuda.reset_peak_memory_stats()
        if limited:
            cuda.limit(before + needed * 6 // 10)
        dry_run = partial(lambda engine, rows: engine.dry_run(ids[:rows], negative), engine)
        rows = find_micro_batch_size(dry_run, len(ids), minimum=1)
        assert (rows < len(ids)) == limited
        losses.append(engine.update(list(ids.split(rows)), negative, ids[:, 1:].numel()).loss)
        needed = torch.cuda.max_memory_allocated() - before
        cuda.limit()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_parked_optimizer_comes_back() -> None:
    engine, unparked = engine_of("opt", zero_stage=0), engine_of("opt", zero_stage=0)
    for each, park in ((engine, True), (unparked, False)):
        each.flip.parity_check_every = 0
        advance(each, batches()[:1])
        with each.generating(keep=False, park_optimizer=park) as rollouts:
            rollouts.generate([[1, 2, 3]], Sampling(2), [0])
    assert advance(engine, batches()[1:]) == advance(unparked, batches()[1:])


def test_streamed_blocks_say_what_whole_ones_say() -> None:
    said = []
    for stream in (False, True):
        engine = engine_of("opt", zero_stage=3)
        engine.flip.stream, engine.flip.parity_check_every = stream, 0
        with engine.generating() as rollouts:
            answers = rollouts.generate([[1, 2, 3], [4, 5]], Sampling(3, seed=1), [0, 1, 2, 3], samples=2)
            said.append([a.token_ids for a in answers])
            assert rollouts._loop is not None and rollouts._loop.cache is not None
            size = rollouts._loop.cache.size
            assert (size.prompt_slots, size.answer_slots) == (2, 4 + 1)
    assert said[0] == said[1]


def test_a_capture_that_fails_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that reads from the device when it is captured, and no sooner."""
    right = SlotModel.__call__

    def read(self: SlotModel, *inputs: Any) -> Tensor:
        logits = right(self, *inputs)
        if torch.cuda.is_current_stream_capturing():
            float(logits.sum())
        return logits

    model = build("opt").cuda()
    monkeypatch.setattr(SlotModel, "__call__", read)
    with pytest.raises(RuntimeError, match=r"could not be captured .*not permitted.*generate with stream=true"):
        Generator(model, "cuda").generate([[1, 2, 3]], Sampling(2), [0])
    assert cuda.faults() == ["a capture was given up, and torch believes that it runs"]
