"""Pipeline parallelism with the stages and schedules of `torch.distributed.pipelining`.

Training alternates forwards and backwards (1F1B; Narayanan et al., 2019, arXiv:1806.03377). Forwards without backwards,
and steps with fewer micro-batches than stages, run all forwards first (GPipe; Huang et al., 2019, arXiv:1811.06965).

Every rank gets the full micro-batches of a step and runs the model's own forward on them, so masks, positions and
rotary angles are available everywhere. A rank replaces the input of its first block by the hidden states that it
received. Behind its last block an exception ends the forward, as in `torch.utils.checkpoint`; the final norm, the head
and the loss run on the last rank only. A schedule needs messages of one shape, so hidden states travel as rows of
tokens, padded to the largest micro-batch of the step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import pad

from engine.config import TORCH_DTYPE
from engine.internals import tree_map_only
from engine.parallel import collectives, dist, dtensors, meshes, zero
from engine.parallel.pipeline_split import ForwardEnd, PipelineSplit
from engine.passes import LossAndMetrics, LossFn, Passes, ScoreFn, to_host, watch_pass


class PipelinePasses(Passes):
    """The passes of a split model. Every rank calls, with the same micro-batches on the ranks of one model.

    A call of the module outside of a pass goes through all ranks in turn and returns the last rank's output on each of
    them. It supports no gradients.
    """

    def __post_init__(self) -> None:
        """The module is already sharded, so that FSDP2's hooks around blocks run inside those registered here."""
        super().__post_init__()
        module = self.module
        split: PipelineSplit = vars(module)["pipeline_split"]
        self.split, self._dtype = split, TORCH_DTYPE[self.config.dtype]
        zero_mesh = meshes.zero_mesh(stage=self.config.zero_stage, shard_ranks=self.config.shard_ranks)
        self._group, self._ends = zero_mesh.get_group("pipeline"), meshes.first_and_last_stage_group()
        self._running = False
        self._received: Tensor | None = None
        self._max_tokens = 0  # rows of a message
        module.forward = partial(self._forward, module.forward)  # type: ignore[method-assign]
        if not split.is_first:
            split.blocks[0].register_forward_pre_hook(self._insert_received, prepend=True, with_kwargs=True)
        if not split.is_last:
            split.blocks[-1].register_forward_hook(self._end_after_block)
            module.register_forward_hook(self._end_after_module)

    def train(self, micro_batches: Sequence[Any], loss_fn: LossFn[Any], count: float) -> list[LossAndMetrics]:
        self.tracker.start_update()
        results = self._train(micro_batches, loss_fn, self.scaler.scale * dist.world().data_size / count)
        self._finish_step()
        self.tracker.after_backward()
        return self._broadcast_from_last(to_host(results))

    def score(self, micro_batches: Sequence[Any], score_fn: ScoreFn) -> list[Sequence[Any]]:
        def scored(micro_batch: Any) -> tuple[Tensor, Sequence[Any]]:
            return torch.zeros((), device=dist.world().device), score_fn(self.module, micro_batch)

        with watch_pass():
            results = self._run(micro_batches, scored)
        # Results may be views of one tensor, and the pickle of a view contains the memory of the whole tensor.
        return self._broadcast_from_last(tree_map_only(Tensor, Tensor.clone, to_host(results)))

    def _dry_run(self, micro_batch: Any, loss_fn: LossFn[Any]) -> None:
        self._train([micro_batch] * self.split.size, loss_fn, 1.0)

    def _train(self, micro_batches: Sequence[Any], loss_fn: LossFn[Any], factor: float) -> list[LossAndMetrics | None]:
        """Run all forwards and backwards; gradients are those of `factor` times the losses."""

        def scaled_loss(micro_batch: Any) -> tuple[Tensor, LossAndMetrics]:
            with self.tracker.training():
                loss, metrics = loss_fn(self.module, micro_batch)
            return loss * factor, tree_map_only(Tensor, Tensor.detach, (loss, metrics))

        with watch_pass():
            return self._run(micro_batches, scaled_loss)

    def _run(self, micro_batches: Sequence[Any], work: Callable[[Any], tuple[Tensor, Any]]) -> list[Any]:
        """Run the forwards of micro-batches, and with gradients enabled the backwards.

        `work(micro_batch)` calls the module once and returns the loss and any result. Returns the results on the last
        rank; on the other ranks, every result is None. A step with gradients ends with `_finish_step`.
        """
        number, trains = len(micro_batches), torch.is_grad_enabled()
        self._max_tokens = max(_token_count(micro_batch) for micro_batch in micro_batches)
        results: list[Any] = [None] * number

        def run_stage(first: Tensor, index: Tensor | None = None) -> Tensor:
            """Run a micro-batch. The input is its index. After the first rank, a message precedes the index."""
            position = int(first if index is None else index)
            self._running, self._received = True, None if index is None else first
            try:
                output, results[position] = work(micro_batches[position])
            except ForwardEnd as end:
                output = end.value
            finally:
                self._running, self._received = False, None
            if trains:
                output.requires_grad_()  # the schedule runs a backward even if nothing on this rank is trained
                output.register_hook(lambda _: self._before_backward(last=position == number - 1))
            return output

        module = nn.Module()
        module.forward = run_stage  # type: ignore[method-assign, assignment]
        self._run_schedule(module, number, trains=trains)
        return results

    def _before_backward(self, *, last: bool) -> None:
        zero.before_backward(self.module, stage=self.config.zero_stage, last=last)

    def _run_schedule(self, module: nn.Module, number: int, *, trains: bool) -> None:
        """Run `module` on the indices of `number` micro-batches. A schedule supports one shape of messages only."""
        shape = (self._max_tokens, self.split.hidden_size)
        message = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.long, device="meta")
        stage = PipelineStage(
            module,
            self.split.rank,
            self.split.size,
            dist.world().device,
            group=self._group,
            input_args=index if self.split.is_first else message,
            output_args=loss if self.split.is_last else message,
        )
        kind = Schedule1F1B if trains and number >= self.split.size else ScheduleGPipe
        # The loss is the output of the last stage, whatever the target is.
        schedule = kind(stage, number, (lambda loss, target: loss) if trains else None, scale_grads=False)
        indices = torch.arange(number)
        try:
            if self.split.is_first:
                schedule.step(indices, return_outputs=False)
            else:
                schedule.step(index=indices, target=indices if trains else None, return_outputs=False)
        except RuntimeError as wrapped:
            raise wrapped.__cause__ or wrapped from None
        messages = (not self.split.is_last) + (trains and not self.split.is_first)
        collectives.count_bytes("other", messages * number * message.nbytes)

    def _finish_step(self) -> None:
        """End a step: add the gradients of a tied weight as embedding (first rank) and as head (last rank)."""
        zero.release(self.module)
        if self._ends is None:
            return
        for name, parameter in self.module.named_parameters():
            if name in self.split.tied and parameter.grad is not None:
                collectives.all_reduce(dtensors.local(parameter.grad), group=self._ends)

    def squared_norm(self) -> float:
        """Return the sum of squares of the full model's gradients, the same number on every rank."""
        counted_on_first_rank = frozenset() if self.split.is_first else self.split.tied
        named = self.module.named_parameters()
        gradients = [p.grad for name, p in named if p.grad is not None and name not in counted_on_first_rank]
        return collectives.all_reduce(dtensors.squared_norm(gradients), group=self._group).item()

    def _broadcast_from_last(self, value: Any) -> Any:
        """Return the last rank's object on every rank."""
        return dist.broadcast_object(value, source=self.split.size - 1, group=self._group)

    def all_parameters(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of all ranks on every rank, in the order of the ranks; tied tensors once.

        `own` are the full tensors of this rank. It is consumed in this rank's turn, and may be collective among the
        ranks that hold the same blocks.
        """
        device, seen = dist.world().device, set[str]()
        for turn in range(self.split.size):
            tensors = iter(own) if turn == self.split.rank else iter(())
            while True:
                name, tensor = next((item for item in tensors if item[0] not in seen), (None, None))
                header = None if tensor is None else (name, tensor.shape, tensor.dtype)
                header = dist.broadcast_object(header, source=turn, group=self._group)
                if header is None:
                    break
                name, shape, dtype = header
                seen.add(name)
                full = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
                yield name, collectives.broadcast(full, source=turn, group=self._group)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the module's forward. It returns normally, so that FSDP2's hooks of the module run."""
        if not self._running:
            return self._forward_on_all_ranks(partial(forward, *args, **kwargs))
        try:
            return forward(*args, **kwargs)
        except ForwardEnd as end:
            rows = end.value.flatten(0, -2).to(self._dtype)  # (B, T, D) -> (B T, D)
            return pad(rows, (0, 0, 0, self._max_tokens - len(rows))).contiguous()

    def _insert_received(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the first input of a block, whose shape is right, by the received hidden states."""
        received, self._received = self._received, None
        if received is None:
            raise ValueError(
                "pipeline_parallel: the loss function called the module twice for one micro-batch. Call it once"
            )
        name = None if args else next(iter(kwargs))
        placeholder = args[0] if name is None else kwargs[name]
        like = placeholder[0] if isinstance(placeholder, tuple) else placeholder
        hidden = received[: like.shape[:-1].numel()].view(like.shape)
        return ((hidden, *args[1:]), kwargs) if name is None else (args, kwargs | {name: hidden})

    def _end_after_block(self, block: nn.Module, args: Any, output: Any) -> None:
        raise ForwardEnd(output[0] if isinstance(output, tuple) else output)

    def _end_after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            raise ForwardEnd(output)

    def _forward_on_all_ranks(self, forward: Callable[[], Any]) -> Any:
        """Run the ranks in turn. All ranks raise the exception of any rank, so that none waits for a message."""
        if torch.is_grad_enabled():
            raise ValueError(
                "pipeline_parallel: a module that is called outside of Engine.update supports no gradients. Train with "
                "Engine.update, or call the module under torch.no_grad()"
            )
        value: Any = None
        for turn in range(self.split.size):
            problem: Exception | None = None
            if turn == self.split.rank:
                self._received = None if value is None else value.flatten(0, -2)
                try:
                    value = forward()
                except ForwardEnd as end:
                    value = end.value
                except Exception as error:
                    problem = error
                self._received = None
            on_cpu = tree_map_only(Tensor, Tensor.cpu, value)
            on_cpu, problem = dist.broadcast_object((on_cpu, problem), source=turn, group=self._group)
            if problem is not None:
                raise problem
            value = tree_map_only(Tensor, partial(Tensor.to, device=dist.world().device), on_cpu)
        return value


def _token_count(micro_batch: Any) -> int:
    """Return the tokens of a tensor of token ids, or of the `input_ids` of a mapping or an object."""
    if isinstance(micro_batch, Mapping):
        ids = micro_batch.get("input_ids")
    else:
        ids = getattr(micro_batch, "input_ids", micro_batch)
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"pipeline_parallel counts the tokens of a micro-batch, and {type(micro_batch).__name__} has no input_ids. "
            "Pass a tensor of token ids, or a mapping or object with input_ids"
        )
    return ids.numel()
