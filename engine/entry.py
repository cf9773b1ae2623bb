"""`engine.initialize` makes an engine of any module, from an `EngineConfig` or a DeepSpeed configuration.

It also accepts the arguments of `deepspeed.initialize`, and then returns its four values.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from engine import optim
from engine.config import EngineConfig, OptimizerConfig
from engine.deepspeed_json import Parsed, parse
from engine.engine import Engine
from engine.parallel import dist

DeepSpeedConfig = Mapping[str, Any] | str | Path
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")  # options that do not change the result


class EngineSchedule:
    """The learning-rate schedule of an engine, with the methods of torch's schedulers that training loops call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group in the last step."""
        optimizer = self._engine.optimizer
        return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]

    def step(self) -> None:
        """Do nothing: `engine.step` advances the schedule."""


def initialize(
    model: nn.Module,
    config: EngineConfig | DeepSpeedConfig | None = None,
    *,
    optimizer: OptimizerConfig | torch.optim.Optimizer | MakeOptimizer | None = None,
    scheduler: Callable[[int], float] | None = None,
    fill: Callable[[nn.Module], None] | None = None,
    rollout_path: str | None = None,
    args: Any = None,
    model_parameters: Iterable[Tensor] | None = None,
    training_data: "Dataset[Any] | None" = None,
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dist_init_required: bool | None = None,
    config_params: DeepSpeedConfig | None = None,
) -> Any:
    """Shard `model` over the ranks, in place, and give it an optimizer. Returns an `Engine`.

    `config` is an `EngineConfig`, or a DeepSpeed configuration as a dictionary or a JSON file. With a DeepSpeed
    configuration, `optimizer` and `scheduler` fill keys that are "auto" or absent. Without any optimizer, the engine is
    frozen and only computes. `optimizer` is an `OptimizerConfig`, or an optimizer of torch.optim over the trainable
    parameters, of which the engine takes class and settings; with an `EngineConfig`, gradients are then not clipped.
    `scheduler` maps the optimizer step (from 0) to its rate.

    `fill(module)` gives values to a module on the meta device, after it was sharded. `rollout_path` names the submodule
    that generates text, for `generating` ("" is the model itself). Joins the process group that the environment names
    (torchrun); without one, runs on one rank.

    `args` and the arguments after it are those of `deepspeed.initialize`. If one of them is given, or a torch optimizer
    with a DeepSpeed configuration, it returns (engine, optimizer, training data loader, schedule) as DeepSpeed does. A
    torch optimizer overrides the one of the configuration, and the schedule of the configuration overrides
    `lr_scheduler`. Do not step the returned optimizer or schedule: `engine.step` does.

    Raises ValueError for settings that are not possible, with the setting to write instead.
    """
    if config is None:
        config = getattr(args, "deepspeed_config", None) if config_params is None else config_params
    of_deepspeed = (args, model_parameters, training_data, lr_scheduler, collate_fn, dist_init_required, config_params)
    if any(argument is not None for argument in of_deepspeed) and (config is None or isinstance(config, EngineConfig)):
        raise ValueError("the arguments of deepspeed.initialize need a DeepSpeed configuration: config=FILE or {...}")
    if model_parameters is not None:
        _require_trainable(model_parameters, model, "model_parameters")
    if not (scheduler or lr_scheduler) and "initial_lr" in getattr(optimizer, "param_groups", [{}])[0]:
        raise ValueError(
            "optimizer: a scheduler of torch sets its learning rate, which the engine would not follow; pass it as "
            "lr_scheduler=, or with an EngineConfig a function from the step to the rate as scheduler="
        )
    overrides = optimizer is not None and not isinstance(optimizer, OptimizerConfig)
    if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
        optimizer = optimizer_config(optimizer, model)
    if config is None or isinstance(config, EngineConfig):
        layout = config or EngineConfig()
        if optimizer is not None and overrides:
            optimizer = replace(optimizer, max_grad_norm=0.0)  # torch and FSDP2 do not clip
        return Engine(model, layout, optimizer=optimizer, scheduler=scheduler, fill=fill, rollout_path=rollout_path)
    parsed = parse(config, ranks=dist.world().size, optimizer=optimizer, overrides=overrides)
    for line in parsed.ignored if dist.is_rank_zero() else ():
        print(f"engine: {line}", flush=True)
    if lr_scheduler is not None:
        scheduler = _rates(lr_scheduler, parsed.optimizer)
    engine = Engine(
        model,
        parsed.engine,
        optimizer=parsed.optimizer,
        scheduler=parsed.scheduler or scheduler,
        fill=fill,
        rollout_path=rollout_path,
    )
    if not overrides and all(argument is None for argument in of_deepspeed):
        return engine
    loader = _data_loader(training_data, collate_fn, parsed) if training_data is not None else None
    has_schedule = parsed.scheduler is not None or scheduler is not None
    return engine, engine.optimizer, loader, EngineSchedule(engine) if has_schedule else None


def optimizer_config(optimizer: torch.optim.Optimizer | MakeOptimizer, model: nn.Module) -> OptimizerConfig:
    """Translate a torch optimizer over a model's trainable parameters. Raises ValueError if that is not possible.

    All parameter groups must have the same settings. Weight decay may be 0 for exactly the biases and norms.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    kind, groups = type(optimizer), optimizer.param_groups
    name = kind.__name__.lower()
    if name == "adam" and groups[0].get("decoupled_weight_decay"):
        name = "adamw"
    if kind.__module__.partition(".")[0] not in ("torch", "engine"):
        raise ValueError(
            f"optimizer: {kind.__module__}.{kind.__name__} is not of torch.optim; write OptimizerConfig(name=...)"
        )
    optim.optimizer_class(kind.__name__)  # raises for classes that cannot work on shards
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ValueError("optimizer: it has taken steps, whose states would be lost; pass a new optimizer")
    _require_trainable([p for group in groups for p in group["params"]], model, "optimizer")
    for key in groups[0].keys() - {"params", "weight_decay", "initial_lr"}:
        values = [group.get(key) for group in groups]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"optimizer: its parameter groups differ in {key} ({values}); write one value for all groups"
            )
    decay = {float(group.get("weight_decay", 0.0)) for group in groups}
    without = {id(p) for group in groups if not group.get("weight_decay") for p in group["params"]}
    vectors = {id(p) for p in model.parameters() if p.requires_grad and p.ndim < 2}
    if len(decay) > 1 and (len(decay - {0.0}) > 1 or without != vectors):
        raise ValueError(
            f"optimizer: its parameter groups differ in weight_decay ({sorted(decay)}); write one value for all, or 0 "
            "for exactly the biases and norms (parameters with fewer than 2 dimensions)"
        )
    signature = inspect.signature(kind).parameters
    own = {field: groups[0][field] for field in optim.CONFIG_FIELDS.get(name, ())}
    if "betas" in own:
        own["betas"] = tuple(own["betas"])
    fields = ("lr", "weight_decay", "params", *own, *(("decoupled_weight_decay",) if name in optim.ADAMS else ()))
    options = {
        key: value
        for key, value in groups[0].items()
        if key in signature and key not in (*fields, *IMPLEMENTATIONS) and value != signature[key].default
    }
    return OptimizerConfig(
        lr=float(groups[0].get("initial_lr", groups[0]["lr"])),
        schedule="constant",
        weight_decay=max(decay),
        decay="matrices" if len(decay) > 1 else "all",
        name=name,
        options=options,
        **own,
    )


def _require_trainable(parameters: Iterable[Any], model: nn.Module, argument: str) -> None:
    """Raise ValueError if these are not exactly the trainable parameters of the model."""
    found: set[int] = set()
    for each in parameters:
        found |= {id(p) for p in each["params"]} if isinstance(each, Mapping) else {id(each)}
    named = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for key, name in named.items() if key not in found]
    if missing:
        raise ValueError(
            f"{argument}: {len(missing)} trainable parameters are missing ({missing[0]}, ...); add them, or freeze "
            "them with requires_grad_(False)"
        )
    if found - named.keys():
        raise ValueError(f"{argument}: it has parameters that are frozen or not of this model; remove them")


def _rates(
    scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler], optimizer: OptimizerConfig | None
) -> Callable[[int], float]:
    """The rates of a torch scheduler by optimizer step."""
    if optimizer is None:
        raise ValueError("lr_scheduler: there is no optimizer to schedule; add the optimizer section, or optimizer=")
    stepped = scheduler
    if not isinstance(stepped, LRScheduler):
        stepped = stepped(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=optimizer.lr))
    if isinstance(stepped, ReduceLROnPlateau):
        raise ValueError(
            "lr_scheduler: ReduceLROnPlateau needs a metric at each step, which the engine does not have; use a "
            "scheduler that only counts steps"
        )
    if getattr(stepped, "cycle_momentum", False):
        raise ValueError(
            f"lr_scheduler: {type(stepped).__name__} also cycles the momentum, which the engine keeps constant; pass "
            "cycle_momentum=False"
        )
    rates = [float(stepped.get_last_lr()[0])]

    def rate(step: int) -> float:
        with warnings.catch_warnings():  # the optimizer of this scheduler never steps
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            while len(rates) <= step:
                stepped.step()
                rates.append(float(stepped.get_last_lr()[0]))
        return rates[step]

    return rate


def _data_loader(
    data: "Dataset[Any]", collate_fn: Callable[[list[Any]], Any] | None, parsed: Parsed
) -> "DataLoader[Any]":
    """A loader of this rank's micro-batches. Call `loader.sampler.set_epoch(n)` for another order in each epoch."""
    if parsed.micro_batch_size is None:
        raise ValueError("training_data needs a batch size; write train_micro_batch_size_per_gpu in the configuration")
    world = dist.world()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world.data_size, world.data_rank)
    return DataLoader(
        data, parsed.micro_batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=parsed.drops_last_batch
    )
