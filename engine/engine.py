"""The engine: one module laid out over the ranks, its optimizer, and the update.

Two ways to train. `update` takes all micro-batches of a step and a loss that is a sum; the caller says over how many
items of the global batch it runs, and one division makes the mean, so that the number of ranks and micro-batches does
not change an update. `backward` and `step` serve a plain loop, whose loss is the mean over a micro-batch.
"""

import copy
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine import layout, optim, precision
from engine.checkpoint import Checkpointer
from engine.config import EngineConfig, OptimizerConfig
from engine.figures import numbers
from engine.full_parameters import full_parameters
from engine.generation.flip import Flip
from engine.generation.generator import Generator
from engine.generation.inference_model import AssembledModel
from engine.generation.parity_check import compare_logprobs
from engine.loading import copy_local, persistent_buffers
from engine.memory.tracker import MemoryTracker, average_bytes, generator_bytes, optimizer_bytes
from engine.offload import OffloadedOptimizer, parameter_values
from engine.optimizers.ema import Average
from engine.optimizers.onebit_adam import OneBitAdam
from engine.parallel import comm_stats, dist, zero
from engine.parallel.pipeline_split import split_of
from engine.passes import Learned, Passes
from engine.pipeline_passes import PipelinePasses

Batch = TypeVar("Batch")
Score = TypeVar("Score")
LossFn = Callable[[nn.Module, Batch], Learned]


@dataclass(frozen=True)
class Step:
    """The gradient norm of an optimizer step before clipping, its learning rate, and whether it was skipped."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class Update:
    """What one optimizer step did. `sums` are the metrics summed over micro-batches and ranks, `maxima` those of which
    the largest was asked for, `loss` is the mean, and `sent` are the bytes that this rank sent.
    """

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    lr: float
    skipped: bool
    sent: comm_stats.Traffic


class Engine:
    """A module, sharded, with its optimizer. Made by `engine.initialize`.

    `module` is called like the module that went in. `rollout_path` names the submodule that generates text, for
    `generating`. `scheduler` is the learning rate by optimizer step (from 0; a skipped step does not count) and takes
    the place of the optimizer configuration's; `betas` likewise, for schedules that cycle the momentum.
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
        betas: Callable[[int], tuple[float, float]] | None = None,
    ) -> None:
        self.config, self.optimizer_config = config, optimizer
        self.step_count = 0
        self._scheduler, self._betas = scheduler, betas
        self._begun = False
        self._micro_batches = 0
        blueprint = copy.deepcopy(module.get_submodule(rollout_path)) if rollout_path is not None else None
        self._assembled: AssembledModel | None = None
        self._values = parameter_values(module) if layout.offloads(config, optimizer) else {}
        self.module, self._nvme_parameters = module, layout.lay_out(module, config, optimizer)
        self._flip: Flip | None = None
        if rollout_path is not None and blueprint is not None:
            source, dtype = self.module.get_submodule(rollout_path), self.dtype
            if config.pipeline_parallel > 1:
                self._assembled = AssembledModel(blueprint, rollout_path, dtype)
                source = self._assembled.module
            self._flip = Flip(blueprint, source, dtype, config.tensor_plan)
        offloaded = layout.rests(config, optimizer)
        self.memory_tracker = MemoryTracker(
            self.module, self._other_owners, offloaded=offloaded, hooks=not config.compile_blocks
        )
        self.scaler = precision.LossScaler(config.loss_scale, enabled=config.dtype == "fp16")
        self._passes = self._make_passes()
        self.optimizer = self._build(optimizer) if optimizer is not None else None
        self.average = Average(self.module, self.optimizer)
        self._fill(fill)
        if self.optimizer is None:
            self.module.eval().requires_grad_(False)

    def _make_passes(self) -> Passes:
        split = split_of(self.module)
        if split is None:
            return Passes(self.module, self.config, self.memory_tracker, self.scaler, self.discard)
        return PipelinePasses(self.module, self.config, self.memory_tracker, self.scaler, self.discard, split)

    def _build(self, config: OptimizerConfig) -> torch.optim.Optimizer | OffloadedOptimizer:
        if layout.offloads(self.config, config):
            release = self._nvme_parameters.release_pages if self._nvme_parameters is not None else None
            return OffloadedOptimizer(self.module, config, self.config, after_write=release)
        return optim.build(self.module, config, states=self.config.states)

    def _fill(self, fill: Callable[[nn.Module], None] | None) -> None:
        """Give parameters their values, and offloaded masters theirs in full precision."""
        offloaded = self.optimizer if isinstance(self.optimizer, OffloadedOptimizer) else None
        with offloaded.initializing() if offloaded is not None else nullcontext():
            for name, parameter in self.module.named_parameters():
                if name in self._values:
                    copy_local(parameter, self._values.pop(name))
            if fill is not None:
                fill(self.module)
        self._shards_changed()

    def _shards_changed(self) -> None:
        """Shards in files have new values: write them, and give back the memory they took."""
        self._let_go()
        if self._nvme_parameters is not None:
            self._nvme_parameters.start_flush()

    def _let_go(self) -> None:
        """Give back the memory that shards in files took while they were read."""
        if self._nvme_parameters is not None:
            self._nvme_parameters.release_pages()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        return dist.world().device

    @property
    def dtype(self) -> torch.dtype:
        """The precision that the module computes in."""
        return precision.TORCH_DTYPE[self.config.dtype]

    def backward(self, loss: Tensor, *, count: float | None = None, last: bool | None = None) -> None:
        """Add the gradient of a micro-batch's loss.

        Without `count`, `loss` is the mean over this rank's micro-batch, and what is added up is the mean over ranks
        and over `gradient_accumulation` micro-batches. With it, `loss` is a sum, and the gradient of `loss / count`
        summed over ranks is added. `last` says that no more micro-batches follow before the step; by default that is
        counted for means, and True for sums.
        """
        if self.optimizer is None:
            raise ValueError(
                "without an optimizer parameters are frozen: initialize(..., optimizer=OptimizerConfig(lr=...)), or "
                '"optimizer" in a DeepSpeed configuration'
            )
        self._check_arrangement()
        if self.config.pipeline_parallel > 1:
            raise ValueError("pipeline_parallel takes all micro-batches of a step at once: call update")
        if last is None:
            last = count is not None or self._micro_batches + 1 >= self.config.gradient_accumulation
        if not self._begun:
            self.begin(last=last)
        # FSDP2 averages gradients over ranks, and each of a sequence group has a summand of the group's.
        world, steps = dist.world(), self.config.gradient_accumulation
        self._passes.backward(loss, world.sequence / steps if count is None else world.zero_size / count, last=last)
        self._micro_batches += 1
        self._begun = False

    def _check_arrangement(self) -> None:
        world, config = dist.world(), self.config
        asked = (config.tensor_parallel, config.pipeline_parallel, config.sequence_parallel)
        if (world.tensor, world.pipeline, world.sequence) != asked:
            raise ValueError("engines side by side must all have the same tensor_, pipeline_ and sequence_parallel")

    def begin(self, *, last: bool) -> None:
        """Prepare the coming forward and backward; `backward` does so itself where nobody did."""
        self._passes.prepare(last=last)
        self._begun = True

    def step(self) -> Step | None:
        """Clip, update and clear, when `gradient_accumulation` micro-batches are in; until then nothing, and None."""
        if self._micro_batches < self.config.gradient_accumulation:
            return None
        return self._step(float(self._gradients().squared_norm()))

    def _step(self, squared_norm: float) -> Step:
        """A step with a non-finite gradient is skipped on every rank alike. `squared_norm` is the gradient's."""
        assert self.optimizer is not None and self.optimizer_config is not None, "a frozen engine has no step"
        config, gradients = self.optimizer_config, self._gradients()
        if dist.world().tensor > 1:  # each of a group has a gradient of what they hold whole; one's alone may overflow
            squared_norm = dist.mean_over_ranks(squared_norm)
        norm = math.sqrt(squared_norm) / self.scaler.scale
        lr = self._set_rates(self.optimizer)
        skipped = not math.isfinite(norm)
        unused = zero.without_gradient(self.module)
        if not skipped:
            factor = 1.0 / self.scaler.scale
            if config.max_grad_norm > 0:
                factor *= min(1.0, config.max_grad_norm / (norm + 1e-6))
            if factor != 1.0:
                gradients.scale(factor)
            self._forget(unused)
            self.optimizer.step()
            self.average.update()
            self._shards_changed()
        self.optimizer.zero_grad()
        self.scaler.update(skipped)
        self.step_count += 1
        self._micro_batches = 0
        return Step(norm, lr, skipped)

    def _forget(self, names: Collection[str]) -> None:
        """Leave these parameters without a gradient."""
        if isinstance(self.optimizer, OffloadedOptimizer):
            self.optimizer.remove_gradients(names)
        for name, parameter in self.module.named_parameters() if names else ():
            if name in names:
                parameter.grad = None

    def _gradients(self) -> optim.Gradients | OffloadedOptimizer | OneBitAdam:
        """The step's gradients: the module's, or those that an optimizer has taken or averages itself."""
        zero.release(self.module)  # a forward behind the last backward has gathered what is about to change
        if isinstance(self.optimizer, OffloadedOptimizer | OneBitAdam):
            return self.optimizer
        return self._passes.gradients()

    def _set_rates(self, optimizer: torch.optim.Optimizer | OffloadedOptimizer) -> float:
        """Give the optimizer the coming step's learning rate (and betas, where those are scheduled)."""
        assert self.optimizer_config is not None
        taken = self.step_count - self.scaler.skipped
        lr = self._scheduler(taken) if self._scheduler else optim.learning_rate(self.optimizer_config, self.step_count)
        for group in optimizer.param_groups:
            group["lr"] = lr
            if self._betas is not None and "betas" in group:
                group["betas"] = self._betas(taken)
        return lr

    def update(
        self,
        micro_batches: Sequence[Batch],
        loss_fn: "LossFn[Batch]",
        count: float,
        *,
        maxima: Collection[str] = (),
        before_step: Callable[[Mapping[str, float]], None] | None = None,
    ) -> Update:
        """One optimizer step over this rank's micro-batches; every rank passes as many.

        `loss_fn(module, micro_batch)` returns the loss summed over its items and a dictionary of metrics, summed
        likewise; of those named in `maxima` the largest is kept. `count` is the number of items in the global batch.
        `before_step` sees the sums of the global batch while the parameters are still those that made them; what it
        raises stops the update. The host waits for its device once, for all figures together. Raises
        `engine.oom.PassOutOfMemory` if a pass runs out of memory.
        """
        self._check_arrangement()
        before = comm_stats.sent()
        figures: dict[str, float | Tensor] = {}
        total: float | Tensor = 0.0
        for loss_sum, metrics in self._passes.learn(micro_batches, loss_fn, count):
            total = total + loss_sum
            for name, value in metrics.items():
                joined = _larger if name in maxima else operator.add
                figures[name] = joined(figures[name], value) if name in figures else value
        *read, loss, squared_norm = numbers([*figures.values(), total, self._gradients().squared_norm()])
        local = self._passes.metrics_of_step(dict(zip(figures, read, strict=True)) | {"loss": loss})
        most = {name: dist.max_over_ranks(local.pop(name)) for name in maxima}
        sums = dist.sum_over_ranks(local)
        loss = sums.pop("loss") / count
        if before_step is not None:
            before_step(sums)
        done = self._step(squared_norm)
        return Update(loss, sums, most, done.grad_norm, done.lr, done.skipped, comm_stats.sent() - before)

    def dry_run(self, micro_batch: Batch, loss_fn: "LossFn[Batch]") -> None:
        """Run forward and backward of a micro-batch and discard the result: weights and random state do not change.

        Every rank calls. After a dry run of the largest micro-batch, a step whose micro-batches are no larger fits.
        Raises `engine.oom.PassOutOfMemory` if it does not fit.
        """
        self._passes.dry_run(micro_batch, loss_fn)

    def discard(self) -> None:
        """Discard the passes since the last step: their gradients, and the parameters that they gathered."""
        zero.discard(self.module)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._micro_batches, self._begun = 0, False

    def score(
        self, micro_batches: Sequence[Batch], work: Callable[[nn.Module, Batch], Sequence[Score]]
    ) -> list[Sequence[Score]]:
        """Return `work` of each micro-batch within `scoring`: one result for each row, in order.

        Every rank passes equally many micro-batches. Tensors in results may be left on the device: they come to the
        host together, at the end. Raises `engine.oom.PassOutOfMemory` if a pass runs out of memory.
        """
        with self.scoring(), self.memory_tracker.scoring():
            return self._passes.score(micro_batches, work)

    def score_to_learn(
        self, micro_batches: Sequence[Batch], work: Callable[[nn.Module, Batch], Sequence[Score]]
    ) -> list[Sequence[Score]] | None:
        """As `score`, by the forwards that the coming `update` over the very same micro-batches learns from.

        `work` calls the module once, and so does the update's `loss_fn`, which gets the output of that call. Until then
        the graphs of all micro-batches are held. Any other use of the engine discards them, and the update makes its
        own forwards. Dropout is as in training. Returns None under pipeline parallelism, which has no such forwards.
        """
        self._check_arrangement()
        return self._passes.score_to_learn(micro_batches, work)

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write parameters, optimizer and counters into a folder, sharded; returns when it is whole on disk.

        `extra` is kept with it (JSON, the same on every rank). Every rank calls. Raises OSError where writing fails.
        """
        checkpointer = Checkpointer({"engine": self})
        checkpointer.save(Path(folder), extra or {})
        checkpointer.wait()

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Take over what `save` wrote, at any number of ranks and any stage; returns its `extra`. Every rank calls.

        Before anything changes it raises `engine.checkpoint.Damaged`, an OSError, where a file is not as it was
        written, and ValueError where it is a checkpoint of another model or another kind of optimizer.
        """
        self._rest()
        return Checkpointer({"engine": self}).load(Path(folder))[0]

    def _rest(self) -> None:
        """No parameters gathered, no forward that waits for its loss."""
        self._passes.forget()
        zero.release(self.module)

    @contextmanager
    def scoring(self) -> Iterator[nn.Module]:
        """No gradients, dropout off; gathered parameters are released at the end."""
        self._passes.forget()
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield self.module
        finally:
            zero.release(self.module)
            self._let_go()
            self.module.train(training)

    @contextmanager
    def generating(self, *, keep: bool = True, park_optimizer: bool = False) -> Iterator[Generator]:
        """The hybrid flip: provide a generator with the current weights, in a module without hooks. Collective.

        `keep` keeps its memory for the next flip. `park_optimizer` moves optimizer states to the host meanwhile.
        """
        self._rest()
        park = self.optimizer if park_optimizer and isinstance(self.optimizer, torch.optim.Optimizer) else None
        with self._assembled_parameters(), self.flip.generating(keep=keep, park=park) as rollouts:
            self._let_go()
            yield rollouts
            self.memory_tracker.sample("generate")

    def _assembled_parameters(self) -> AbstractContextManager[None]:
        """Provide every rank with the full model that the flip reads. Under pipeline parallelism each has a stage."""
        if self._assembled is None:
            return nullcontext()
        device = torch.device("cpu") if self.flip.stream else dist.world().device
        return self._assembled.filled(self.full_parameters(), device=device)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name without adapters, full tensor) of each parameter of the whole model, with adapters merged.

        Collective: every rank consumes all of it. A tensor may share memory with the live parameter.
        """
        zero.release(self.module)  # parameters that a forward left gathered
        return self._passes.all_parameters(full_parameters(self.module))

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each persistent buffer of the whole model. Collective, as `full_parameters`."""
        buffers = sorted(persistent_buffers(self.module).items())
        return self._passes.all_parameters((name, buffer.detach()) for name, buffer in buffers)

    def _other_owners(self) -> dict[str, int]:
        """Return the bytes of each owner other than parameters and gradients."""
        generator = generator_bytes(self._flip, self.module) if self._flip is not None else {}
        return optimizer_bytes(self.optimizer) | generator | {"average": average_bytes(self.average)}

    @property
    def flip(self) -> Flip:
        """The generation side: its settings, the time of the last flip, the result of its parity check.

        Raises ValueError if the engine was made without `rollout_path`.
        """
        if self._flip is None:
            raise ValueError(
                "rollout_path is None, so the engine does not know the submodule that generates: pass "
                'initialize(..., rollout_path=NAME) with its name, "" for the module itself'
            )
        return self._flip

    def check_generator(self, logprobs: Sequence[Tensor]) -> None:
        """Compare the answers of the last parity check (`flip.checked`) with the trainer's log-probabilities.

        logprobs: (n,) for the tokens of each answer, by the module's own forward. Raises ValueError if they differ.
        """
        eight_bits = self.config.compress in ("gather8", "both")
        compare_logprobs(self.flip.checked, logprobs, "the trainer's forward", eight_bits=eight_bits)

    def start_averaging(self, decay: float) -> None:
        """Keep an exponential moving average of the trained parameters, fp32, sharded as they are."""
        self.average.start(decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the module holds the average, not the last weights; without averaging nothing changes."""
        self._show(average=True)
        try:
            yield
        finally:
            self._show(average=False)

    def _show(self, *, average: bool) -> None:
        self._rest()
        self.average.swap(shown=average)
        self._shards_changed()


def _larger(one: float | Tensor, other: float | Tensor) -> float | Tensor:
    """The larger of two numbers, on the device where both are there; not finite where one of them is not."""
    return torch.maximum(torch.as_tensor(one), torch.as_tensor(other))
