"""Further tests on the simulated device: checkpoints, memory limits, parked optimizers, streamed blocks, captures.

tests/engine/test_simulated_gpu.py runs this file.
"""

import gc
import warnings
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
from engine.generation import attention, cuda_graph
from engine.generation.attention import DecodeRows, StepTokens
from engine.generation.block_streaming import BlockStream
from engine.generation.decode_loop import DecodeLoop
from engine.generation.decode_step import SlotModel
from engine.generation.generator import Generator
from engine.generation.kv_cache import CacheSize, KVCache
from engine.generation.scheduler import Chunk
from engine.generation.vllm_backend import undisturbed
from engine.generation.weight_sync import LiveParameter
from engine.loading import copy_local
from engine.oom import find_micro_batch_size
from engine.optimizers import bf16_adamw
from engine.optimizers.onebit_adam import OneBitAdam
from engine.parallel import dtensors
from tests.engine.generation.families import build
from tests.engine.test_on_gpu import OPTIMIZER, Policy, batches, loss
from tests.gpu import needs_gpu, single_rank  # noqa: F401  a fixture
from tests.simulated_gpu import cuda

pytestmark = [*needs_gpu, pytest.mark.usefixtures("single_rank")]


def small(family: str, layers: int = 1) -> nn.Module:
    """Return a model with two heads, because Triton's interpreter runs programs for each of them in each layer."""
    return build(family, num_attention_heads=2, num_hidden_layers=layers)


def engine_of(family: str, **layout: Any) -> Engine:
    config = EngineConfig(dtype="fp32", **layout)
    return Engine(Policy(small(family, layers=2)), config, optimizer=OPTIMIZER, rollout_path="lm")


def train(engine: Engine, token_ids: Sequence[Tensor], micro: int = 4) -> list[float]:
    """Run one update for each batch of token ids. Return the losses."""
    return [engine.update(list(ids.split(micro)), loss, ids[:, 1:].numel()).loss for ids in token_ids]


# Each tier with the share of free memory that a copy of the states may take: with one half, all states are copied; with
# zero, the checkpoint is written before training continues.
TIERS: list[tuple[dict[str, Any], float]] = [
    ({"zero_stage": 2}, 0.5),
    ({"zero_stage": 2}, 0.0),
    ({"zero_stage": 3, "offload_optimizer": "cpu", "offload_ratio": 0.5}, 0.0),
    ({"zero_stage": 3, "offload_optimizer": "nvme"}, 0.5),
]


@pytest.mark.parametrize(("layout", "copy_share"), TIERS, ids=str)
def test_training_from_a_checkpoint_equals_undisturbed_training(
    layout: dict[str, Any], copy_share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is written while training continues, from device memory, host memory and files."""
    monkeypatch.setattr(checkpointer, "COPY_SHARE", copy_share)
    engine, resumed = engine_of("opt", **layout), engine_of("opt", **layout)
    for each in (engine, resumed):
        each.start_averaging(0.9)
    train(engine, batches()[:2])
    saving = Checkpointer({"engine": engine})
    saving.save(tmp_path / "step-2", {})
    expected = train(engine, batches()[2:])
    saving.wait()
    Checkpointer({"engine": resumed}).load(tmp_path / "step-2")
    assert train(resumed, batches()[2:]) == expected


def test_pinned_memory_of_earlier_copies_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Checkpointer({})
    tensors = {str(n): chunks_of(torch.zeros(n, device="cuda")) for n in (1000, 1024, 0)}
    monkeypatch.setattr(checkpointer, "host_memory", lambda: SimpleNamespace(available=1000))
    for allocated, fits in ((2 * 8192 - 1000 + 500, True), (2 * 8192 - 1000 + 498, False), (0, False)):
        stats = {"allocated_bytes.current": allocated, "active_bytes.current": 500}
        monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda stats=stats: stats)
        assert saving._can_copy(tensors) == fits


@pytest.mark.parametrize("can_pin", [True, False])
def test_a_checkpoint_copy_has_the_values_before_later_changes(can_pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = torch.empty

    def allocate_without_pinning(*size: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return allocate(*size, **how)

    live = torch.arange(2500.0).to("cuda")
    if not can_pin:
        monkeypatch.setattr(torch, "empty", allocate_without_pinning)
    copy = chunks_of(live).copy_to_host().values
    torch.cuda.synchronize()
    live.fill_(9.0)
    assert copy.device.type == "cpu" and copy.is_pinned() == can_pin
    assert torch.equal(copy, torch.arange(2500.0))


def test_tied_weights_of_a_meta_model_stay_on_the_host() -> None:
    """A stage builds its model on the meta device and fills it later. The tied head is the embedding."""
    policy = Policy(small("opt", layers=2))
    values = {name: p.detach().clone() for name, p in policy.named_parameters()}

    def fill(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            copy_local(parameter, values[name])

    policy.to("meta").lm.tie_weights()  # type: ignore[operator]
    config = EngineConfig(zero_stage=3, dtype="fp32", offload_optimizer="cpu", offload_parameters="cpu")
    engine = Engine(policy, config, optimizer=OPTIMIZER, fill=fill)
    assert cuda.pinned() == 0  # the shards have pinned memory of exactly their size
    assert train(engine, batches()) == pytest.approx(train(engine_of("opt", zero_stage=3), batches()), rel=1e-4)


def test_micro_batches_are_summed_on_the_host() -> None:
    """Gradients are copied to pinned memory while backward continues, also those of host shards."""
    expected = train(engine_of("llama", zero_stage=2), batches()[:2], micro=2)
    waits = []
    layouts: list[dict[str, Any]] = [{"zero_stage": 2}, {"zero_stage": 3, "offload_parameters": "cpu"}]
    for shards in layouts:
        engine = engine_of("llama", **shards, offload_optimizer="cpu")
        cuda.waits()
        actual = train(engine, batches()[:2], micro=2)
        waits.append(Counter(cuda.waits()))
        assert actual == pytest.approx(expected, rel=1e-4)
    assert waits[0] == waits[1] and not any("tier.py:add" in place for place in waits[0])


def test_averages_replace_shards_only_after_the_device_has_read_them() -> None:
    engine = engine_of("opt", zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    engine.start_averaging(0.9)
    train(engine, batches()[:2])
    with engine.averaged(), engine.scoring() as module:
        module(batches()[0])  # the host does not wait for the result


@pytest.mark.parametrize("window", [None, 4])
def test_prompt_chunks_in_one_kernel_call_equal_one_call_each(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks begin a prompt, one continues a prompt."""
    tokens, module = torch.randn(3, 14, 4, 16, device="cuda", dtype=torch.bfloat16), SimpleNamespace(layer_idx=0)
    chunks = [Chunk(1, [0] * 6, 0), Chunk(2, [0] * 2, 3), Chunk(0, [0] * 5, 0), Chunk(3, [0], 0)]
    query, key, value = (t.transpose(0, 1)[None] for t in tokens)
    heads = query, key[:, :2], value[:, :2]
    results = []
    for one_by_one in (False, True):
        cache = KVCache(CacheSize(4, 8, 2, 8), query.device)
        cache.layer(0, *heads[1:]).prompt_keys.fill_(0.5)
        if one_by_one:
            monkeypatch.setattr(attention, "varlen_fits", lambda *_: False)
        step = StepTokens(cache, DecodeRows(*torch.zeros(9, 0, dtype=torch.int64, device="cuda")), chunks)
        out, _ = attention.slot_attention(module, *heads, step=step, sliding_window=window)  # type: ignore[arg-type]
        results.append(out)
        assert ("chunk_bounds" in vars(step)) != one_by_one
    torch.testing.assert_close(results[0].cpu(), results[1].cpu(), atol=2e-2, rtol=2e-2)


def negative(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return -module(ids)[0].sum(), {}


def test_the_micro_batch_size_that_fits_is_found() -> None:
    """The dry run of all rows exceeds the memory. The update in smaller micro-batches equals the update of all rows."""
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
        assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated()
        losses.append(engine.update(list(ids.split(rows)), negative, ids[:, 1:].numel()).loss)
        needed = torch.cuda.max_memory_allocated() - before
        cuda.limit()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_training_is_unchanged_by_parking_the_optimizer() -> None:
    engine, unparked = engine_of("opt", zero_stage=0), engine_of("opt", zero_stage=0)
    for each, park in ((engine, True), (unparked, False)):
        each.flip.parity_check_every = 0
        train(each, batches()[:1])
        with each.generating(keep=False, park_optimizer=park) as rollouts:
            rollouts.generate([[1, 2, 3]], Sampling(2), [0])
            moments = [m for states in each.optimizer.state.values() for m in states.values() if m.ndim]
            assert {m.untyped_storage().nbytes() > 0 for m in moments} == {not park}
    assert train(engine, batches()[1:]) == train(unparked, batches()[1:])


def test_the_norm_of_16_bit_gradients_makes_no_fp32_copies() -> None:
    gradients = [torch.full((10_000,), 2.0, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    torch.cuda.reset_peak_memory_stats()
    before = cuda.allocated()
    assert dtensors.squared_norm(gradients).item() == 4.0 * 80_000
    assert torch.cuda.max_memory_allocated() - before < 10_000


def test_a_step_with_bf16_states_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = torch.Generator()  # the simulated device has no generator
    monkeypatch.setattr(torch, "Generator", lambda device: on_host)
    monkeypatch.setattr(bf16_adamw, "round_stochastically", lambda values, generator: values.bfloat16())
    parameters = [nn.Parameter(torch.ones(8, device="cuda", dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = bf16_adamw.BFloat16AdamW(parameters)
    cuda.waits()
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert cuda.waits() == []


def test_a_step_of_onebit_adam_waits_for_the_norm_only() -> None:
    parameters = [nn.Parameter(torch.ones(8, device="cuda")) for _ in range(2)]
    optimizer = OneBitAdam(parameters, freeze_step=1)
    cuda.waits()
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.squared_norm()
        optimizer.step()
    assert cuda.waits() == ["engine/optimizers/onebit_adam.py:squared_norm"] * 2


def test_streamed_blocks_sample_the_same_tokens_as_resident_blocks() -> None:
    token_ids = []
    for stream in (False, True):
        engine = engine_of("opt", zero_stage=3)
        engine.flip.stream, engine.flip.parity_check_every = stream, 0
        with engine.generating() as rollouts:
            answers = rollouts.generate([[1, 2, 3], [4, 5]], Sampling(3, seed=1), [0, 1, 2, 3], samples=2)
            token_ids.append([a.token_ids for a in answers])
            assert isinstance(rollouts.backend, DecodeLoop) and rollouts.backend.cache is not None
            size = rollouts.backend.cache.size
            assert (size.prompt_slots, size.answer_slots) == (2, 4 + 1)
    assert token_ids[0] == token_ids[1]


def test_blocks_of_a_second_gpu_are_gathered_without_a_context_on_the_first() -> None:
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    try:
        model = build("llama").to(device)
        ids = torch.tensor([[1, 2, 3]], device=device)
        expected = model(input_ids=ids).logits
        stream = BlockStream(model, torch.float32, device)
        names = [name for name, _ in model.named_parameters() if stream.block_of(name) is not None]
        stream.start({name: LiveParameter(model.get_parameter(name).clone(), None) for name in names})
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, expected)
    finally:
        torch.cuda.set_device(0)


def test_the_start_of_vllm_does_not_warn_about_other_gpus() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with undisturbed(torch.device("cuda", 1)):
            pass


def test_the_check_for_reads_does_not_warn_that_it_is_a_prototype(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does so once in a process, at the first answer of a chat."""
    set_mode = torch.cuda.set_sync_debug_mode

    def set_and_warn(mode: int | str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        set_mode(mode)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_and_warn)
    with warnings.catch_warnings(record=True) as shown, cuda_graph._refuse_to_wait():
        warnings.simplefilter("always")
        assert torch.cuda.get_sync_debug_mode() == 2
    assert len(shown) == 1  # at the end of the context, where PyTorch does not repeat it


def test_a_capture_gets_memory_that_training_has_freed() -> None:
    """Training leaves all memory of the device with PyTorch's allocator, which cannot return it during a capture."""
    generator = Generator(small("opt").cuda(), "cuda", cache_bytes=2**20)
    cuda.limit(cuda.allocated() + 2**24)
    torch.empty(2**24, dtype=torch.uint8, device="cuda")  # freed at once
    (answer,) = generator.generate([[1, 2, 3]], Sampling(4, seed=1), [0])
    assert len(answer.token_ids) == 4 and isinstance(generator.backend, DecodeLoop)
    assert all(graphs is not None and graphs._graphs for _, graphs in generator.backend._samplers.values())
    cuda.limit()


def test_graphs_do_not_use_a_workspace_that_another_graph_frees() -> None:
    model = small("opt").cuda()
    first, second = (Generator(model, "cuda", cache_bytes=2**20) for _ in range(2))
    arguments: Any = ([[1, 2, 3]], Sampling(3, seed=1), [0])
    expected = first.generate(*arguments)
    assert second.generate(*arguments) == expected
    second.release()
    assert first.generate(*arguments) == expected


def test_generation_continues_after_memory_ran_out_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server fails the requests of the step and continues."""
    call, model = SlotModel.__call__, small("opt").cuda()
    arguments: Any = ([[1, 2, 3]], Sampling(3, seed=1), [0])
    expected = Generator(model, "cuda", cache_bytes=2**20).generate(*arguments)

    def call_and_allocate(self: SlotModel, *inputs: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**34, dtype=torch.uint8, device="cuda")
        return call(self, *inputs)

    generator = Generator(model, "cuda", cache_bytes=2**20)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(SlotModel, "__call__", call_and_allocate)
        generator.generate(*arguments)
    assert cuda.faults() == []
    assert generator.generate(*arguments) == expected


def test_a_failed_capture_raises_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step reads from the device only while it is captured."""
    call = SlotModel.__call__

    def call_and_read(self: SlotModel, *inputs: Any) -> Tensor:
        logits = call(self, *inputs)
        if torch.cuda.is_current_stream_capturing():
            float(logits.sum())
        return logits

    model = small("opt").cuda()
    monkeypatch.setattr(SlotModel, "__call__", call_and_read)
    with pytest.raises(RuntimeError, match=r"could not be captured .*not permitted.*generate with stream=true"):
        Generator(model, "cuda").generate([[1, 2, 3]], Sampling(2), [0])
    assert cuda.faults() == ["a capture failed, and torch's state still says that it runs"]
