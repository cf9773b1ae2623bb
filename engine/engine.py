"""The engine: one module sharded over the ranks, its optimizer, and the update.

There are two ways to train. `update` takes all micro-batches of a step, a loss that is a sum, and the number of items
in the global batch. One division computes the mean, so the number of ranks and micro-batches does not change an update.
`backward` and `step` serve a plain loop, whose loss is the mean over a micro-batch.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine import optim, sharding
from engine.checkpoint import Checkpointer
from engine.config import TORCH_DTYPE, EngineConfig, OptimizerConfig
from engine.generation.flip import Flip
from engine.generation.generator import Generator
from engine.generation.inference_model import InferenceModel
from engine.generation.parity_check import compare_logprobs
from engine.generation.weight_sync import full_parameters, lora_factors
from engine.memory.tracker import MemoryTracker, generator_bytes, optimizer_bytes, storage_bytes
from engine.optimizer_step import Average, LossScaler, Optimizer, OptimizerStep, Step, Update
from engine.parallel import collectives, dist, zero
from engine.passes import Batch, LossFn, Passes, add_up

Score = TypeVar("Score")


class Engine:
    """A sharded module with its optimizer. `engine.initialize` creates it.

    Call `module` like the original module. `rollout_path` names the submodule that generates text, for `generating`.
    `scheduler` maps the optimizer step (from 0, without skipped steps) to its learning rate and overrides the schedule
    of the optimizer configuration.
    """

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        *,
        optimizer: OptimizerConfig | None = None,
        fill: Callable[[nn.Module], None] | None = None,
        rollout_path: str | None = None,
        scheduler: Callable[[int], float] | None = None,
    ) -> None:
        self.config, self.optimizer_config = config, optimizer
        self.step_count = 0
        self._micro_batches = 0
        self._step_follows = False
        sharding.check_parameters(module, has_fill=fill is not None)
        blueprint = copy.deepcopy(module.get_submodule(rollout_path)) if rollout_path is not None else None
        initial_values = sharding.parameter_values(module) if sharding.uses_offload(config, optimizer) else {}
        self.module, self._nvme_parameters = module, sharding.apply(module, config, optimizer)
        self._world = dist.world()
        self._flip: Flip | None = None
        if blueprint is not None and rollout_path is not None:
            self._flip = self._make_flip(blueprint, rollout_path)
        self.memory_tracker = MemoryTracker(
            self.module,
            self._other_owners,
            offloaded=sharding.offloaded_owners(config, optimizer),
            hooks=not config.compile_blocks,
        )
        self.scaler = LossScaler(config.loss_scale, enabled=config.dtype == "fp16")
        passes: type[Passes] = Passes
        if config.pipeline_parallel > 1:
            from engine.parallel.pipeline_parallel import PipelinePasses

            passes = PipelinePasses
        self._passes = passes(self.module, config, self.memory_tracker, self.scaler, self.discard)
        self.optimizer = self._make_optimizer(optimizer) if optimizer is not None else None
        self.average = Average(self.module, self.optimizer)
        self._optimizer_step: OptimizerStep | None = None
        if self.optimizer is not None and optimizer is not None:
            self._optimizer_step = OptimizerStep(
                self.module, self.optimizer, optimizer, self.scaler, self.average, scheduler
            )
        sharding.fill(self.module, self.optimizer, initial_values, fill)
        self._flush_pages()
        if self.optimizer is None:
            self.module.eval().requires_grad_(False)

    def _make_flip(self, blueprint: nn.Module, path: str) -> Flip:
        make = partial(InferenceModel, blueprint, dtype=self.dtype)
        if self.config.pipeline_parallel == 1:
            return Flip(partial(make, self.module.get_submodule(path), plan=self.config.tensor_plan))
        prefix = f"{path}." if path else ""
        return Flip(
            partial(
                make,
                blueprint,
                parameters=lambda: ((name.removeprefix(prefix), full) for name, full in self.full_parameters()),
            )
        )

    def _make_optimizer(self, config: OptimizerConfig) -> Optimizer:
        if sharding.uses_offload(self.config, config):
            from engine.offload import OffloadedOptimizer

            return OffloadedOptimizer(self.module, config, self.config, after_write=self._release_pages)
        return optim.build(self.module, config, states=self.config.states)

    def _flush_pages(self) -> None:
        """Write changed parameter shards to NVMe in the background, and release their memory."""
        self._release_pages()
        if self._nvme_parameters is not None:
            self._nvme_parameters.file.start_flush()

    def _release_pages(self) -> None:
        """Release the host memory of parameter shards on NVMe."""
        if self._nvme_parameters is not None:
            self._nvme_parameters.file.release(0, self._nvme_parameters.bytes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._passes.discard_scored()
        return self.module(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device of inputs."""
        return dist.world().device

    @property
    def dtype(self) -> torch.dtype:
        """The compute precision of the module."""
        return TORCH_DTYPE[self.config.dtype]

    def _require_optimizer(self) -> None:
        """Raise ValueError for an engine without an optimizer."""
        if self.optimizer is None:
            raise ValueError(
                "the engine has no optimizer, so its parameters are frozen. Pass "
                'initialize(..., optimizer=OptimizerConfig(lr=...)), or "optimizer" in a DeepSpeed configuration'
            )

    def backward(self, loss: Tensor, *, last: bool | None = None) -> None:
        """Add the gradient of a micro-batch's loss, the mean over this rank's micro-batch.

        The gradients are averaged over ranks and `gradient_accumulation` micro-batches. `last` says that the step
        follows. By default, micro-batches are counted.
        """
        self._require_optimizer()
        dist.check_unchanged(self._world)
        if self.config.pipeline_parallel > 1:
            raise ValueError(
                f"pipeline_parallel={self.config.pipeline_parallel} needs all micro-batches of a step at once. Call "
                "update instead of backward"
            )
        if last is None:
            last = self._micro_batches + 1 >= self.config.gradient_accumulation
        # FSDP2 averages gradients over ranks; sequence-parallel ranks each have a summand of their group's gradient.
        self._passes.backward(loss, dist.world().sequence / self.config.gradient_accumulation, last=last)
        self._micro_batches += 1
        self._step_follows = last

    def step(self) -> Step | None:
        """Clip and update after the last micro-batch of a step. After any other, do nothing and return None."""
        if not self._step_follows:
            return None
        *_, squared_norm, unused = self._reduce([], [])
        return self._step(squared_norm, unused)

    def _reduce(
        self, sums: Sequence[float | Tensor], maxima: Sequence[float | Tensor]
    ) -> tuple[list[float], list[float], float, set[str]]:
        """Return sums and maxima over ranks, the squared norm of the gradients, and the parameters that no rank used.

        The host waits for the device once. The norm is a maximum over ranks, because with tensor parallelism replicated
        parameters have a gradient on each rank, and one of them may overflow. A step leaves out unused parameters, as
        on one rank. Their gradients are zeros, or None.
        """
        zero.release(self.module)  # a forward after the last backward has gathered parameters that will change
        # An optimizer has this method if it takes the gradients from the module, or averages them over ranks itself.
        squared_norm = getattr(self.optimizer, "squared_norm", self._passes.squared_norm)()
        trained, used = zero.take_used(self.module)
        numbers, highest = dist.reduce_over_ranks(sums, [*maxima, squared_norm, float(len(trained) - len(used))])
        *highest, norm, missing = highest
        unused = trained.difference(*dist.gather_objects(used)) if missing else set[str]()
        return numbers, highest, norm, unused

    def _step(self, squared_norm: float, unused: set[str]) -> Step:
        assert self._optimizer_step is not None, "a frozen engine has no step"
        step = self._optimizer_step.run(squared_norm, unused, self.step_count)
        if not step.skipped:
            self._flush_pages()
        self.step_count += 1
        self._micro_batches = 0
        self._step_follows = False
        return step

    def update(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn[Batch],
        count: float,
        *,
        maxima: Collection[str] = (),
        before_step: Callable[[Mapping[str, float]], None] | None = None,
    ) -> Update:
        """Take one optimizer step over this rank's micro-batches. Every rank passes the same number of them.

        `loss_fn(module, micro_batch)` returns the loss summed over its items, and a dictionary of summed metrics. For
        the metrics named in `maxima`, the largest value counts instead. `count` is the number of items in the global
        batch. `before_step` receives the sums over the global batch before the parameters change; an exception of it
        stops the update. The host waits for the device once. Raises `engine.oom.PassOutOfMemory` if a pass runs out of
        memory.
        """
        self._require_optimizer()
        dist.check_unchanged(self._world)
        dist.require_equal(f"{len(micro_batches)} micro-batches", "Pass equally many to update on every rank")
        sent_before = collectives.bytes_sent()
        try:
            results = self._passes.train(micro_batches, loss_fn, count)
        except Exception:
            if self._world.size == 1:  # several ranks do not continue after a failure
                self.discard()
            raise
        total_loss, totals = add_up(results, maxima)
        metrics = totals | {"loss": total_loss}
        summed, highest = sorted(metrics.keys() - set(maxima)), sorted(maxima)
        if self.step_count == 0:
            dist.require_equal(f"the metrics {', '.join(summed)}", "Return the same ones from loss_fn on every rank")
        values = ([metrics[name] for name in names] for names in (summed, highest))
        numbers, largest, squared_norm, unused = self._reduce(*values)
        sums = dict(zip(summed, numbers, strict=True))
        loss = sums.pop("loss") / count
        if before_step is not None:
            try:
                before_step(sums)
            except Exception:
                self.discard()
                raise
        step = self._step(squared_norm, unused)
        sent = collectives.bytes_sent() - sent_before
        return Update(**vars(step), loss=loss, sums=sums, maxima=dict(zip(highest, largest, strict=True)), sent=sent)

    def dry_run(self, micro_batch: Batch, loss_fn: LossFn[Batch]) -> None:
        """Run forward and backward of a micro-batch and discard the result. Weights and random state do not change.

        Every rank calls. After a dry run of the largest micro-batch, a step whose micro-batches are no larger fits.
        Raises `engine.oom.PassOutOfMemory` if it does not fit.
        """
        self._require_optimizer()
        self._passes.dry_run(micro_batch, loss_fn)

    def discard(self) -> None:
        """Drop the gradients and the gathered parameters of the passes since the last step."""
        self._passes.discard_scored()
        zero.discard(self.module)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._micro_batches = 0
        self._step_follows = False

    def score(
        self, micro_batches: Sequence[Batch], work: Callable[[nn.Module, Batch], Sequence[Score]]
    ) -> list[Sequence[Score]]:
        """Return `work(module, micro_batch)` of each micro-batch within `scoring`: one result for each row, in order.

        Every rank passes the same number of micro-batches. Results may contain tensors on the device; they are copied
        to the host at the end. Raises `engine.oom.PassOutOfMemory` if a pass runs out of memory.
        """
        with self.scoring(), self.memory_tracker.scoring():
            return self._passes.score(micro_batches, work)

    def score_to_learn(
        self, micro_batches: Sequence[Batch], work: Callable[[nn.Module, Batch], Sequence[Score]]
    ) -> list[Sequence[Score]]:
        """Score like `score`, and keep the graphs for the next `update` over the same micro-batches.

        `work` calls the module once. The `loss_fn` of the update also calls it once, and gets the same output. Any
        other use of the engine discards the graphs; the update then runs its own forwards. Dropout is as in training.
        Pipeline parallelism does not support this and raises ValueError.
        """
        dist.check_unchanged(self._world)
        return self._passes.score_to_learn(micro_batches, work)

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write trained parameters, optimizer and counters into a folder. Return when the files are complete.

        The folder may have an earlier checkpoint, which is replaced, but no other files. It is not the current folder.

        `extra` is JSON to store with them, the same on every rank. Every rank calls. Raises OSError if a write fails.
        """
        self._require_optimizer()
        if self.average.is_shown:
            raise ValueError("engine.save would store the average as the parameters: call it outside of averaged()")
        self._release_parameters()
        checkpointer = Checkpointer({"engine": self})
        checkpointer.save(Path(folder), extra or {})
        checkpointer.wait()

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Load what `save` wrote, at any number of ranks and any ZeRO stage. Return its `extra`. Every rank calls.

        Gradients since the last step are dropped.

        Raises `engine.checkpoint.Damaged` (an OSError) if a file is damaged, and ValueError for a checkpoint of another
        model or another kind of optimizer. Nothing has changed then.
        """
        self._require_optimizer()
        self._release_parameters()
        extra = Checkpointer({"engine": self}).load(Path(folder))[0]
        self.discard()
        return extra

    def _release_parameters(self) -> None:
        """Discard forwards that wait for their update, and release gathered parameters."""
        self._passes.discard_scored()
        zero.release(self.module)

    @contextmanager
    def scoring(self) -> Iterator[nn.Module]:
        """Inside this context there are no gradients and no dropout. Gathered parameters are released at the end."""
        self._passes.discard_scored()
        modes = [(child, child.training) for child in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad():
                yield self.module
        finally:
            zero.release(self.module)
            self._release_pages()
            for child, was_training in modes:
                child.training = was_training

    @contextmanager
    def generating(self, *, keep: bool = True, park_optimizer: bool = False) -> Iterator[Generator]:
        """Flip to generation: provide a generator with the current weights, in a module without hooks. Collective.

        `keep` keeps its memory for the next flip. `park_optimizer` moves the optimizer states to the host meanwhile.
        """
        self._release_parameters()
        park = self.optimizer if park_optimizer and isinstance(self.optimizer, torch.optim.Optimizer) else None
        with self.flip.generating(keep=keep, park=park) as generator:
            self._release_pages()
            yield generator
            self.memory_tracker.sample("generate")

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name without adapters, full tensor) of each parameter of the full model, with adapters merged.

        Collective: every rank iterates to the end. A tensor may share memory with the live parameter.
        """
        self._release_parameters()
        return self._passes.all_parameters(full_parameters(self.module))

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of each LoRA factor of the full model. Collective, as `full_parameters`."""
        self._release_parameters()
        return self._passes.all_parameters(lora_factors(self.module))

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each persistent buffer of the full model. Collective, as `full_parameters`."""
        buffers = sorted(zero.persistent_buffers(self.module).items())
        return self._passes.all_parameters((name, buffer.detach()) for name, buffer in buffers)

    def _other_owners(self) -> dict[str, int]:
        """Return the bytes of each owner other than parameters and gradients."""
        generator = generator_bytes(self._flip, self.module) if self._flip is not None else {}
        average = storage_bytes(self.average.tensors.values())  # an offloaded optimizer counts its own
        return optimizer_bytes(self.optimizer) | generator | {"average": average}

    @property
    def flip(self) -> Flip:
        """The generation side: its settings, the time of the last flip, the result of its parity check.

        Raises ValueError if the engine was created without `rollout_path`.
        """
        if self._flip is None:
            raise ValueError(
                "rollout_path is None, so the engine does not know the submodule that generates. Pass "
                'initialize(..., rollout_path=NAME) with its name, "" for the module itself'
            )
        return self._flip

    def check_generator(self, logprobs: Sequence[Tensor]) -> None:
        """Compare the answers of the last parity check (`flip.checked`) with the trainer's log-probabilities.

        logprobs: (n,) for the tokens of each answer, by the module's own forward. Raises ValueError if they differ.
        """
        eight_bits = self.config.compress in ("gather8", "both")
        compare_logprobs(self.flip.checked, logprobs, eight_bits=eight_bits)

    def start_averaging(self, decay: float) -> None:
        """Start an exponential moving average of the trained parameters, in fp32, sharded like them.

        Call this before the first step. The average has a bias correction (`engine.optimizer_step.average_weight`).
        """
        self._release_parameters()
        self.average.start(decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside this context the module has the averaged weights. Without averaging nothing changes.

        `save` raises ValueError there.
        """
        self._swap_average(shown=True)
        try:
            yield
        finally:
            self._swap_average(shown=False)

    def _swap_average(self, *, shown: bool) -> None:
        self._release_parameters()
        if self.average.runs and self.device.type == "cuda":
            torch.cuda.synchronize()  # a GPU may still copy shards from host memory, which change now
        self.average.swap(shown=shown)
        self._flush_pages()
