"""`initialize` with the arguments of `deepspeed.initialize`: its four values, and the translation of optimizers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from engine import Engine, EngineConfig, OptimizerConfig, initialize
from engine.entry import optimizer_config
from engine.optim import Lion
from engine.parallel import dtensors


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def groups_of(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    """Return the usual parameter groups: no weight decay for biases and norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def weights_after(model: nn.Module, data: Tensor, step: Callable[[Tensor], None]) -> list[Tensor]:
    for rows in data.split(4):
        step(rows)
    return [dtensors.full_tensor(p.detach()).clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.AdamW(groups_of(model), lr=0.05, betas=(0.8, 0.9), eps=1e-6),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1, amsgrad=True),
        lambda model: torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9, nesterov=True),
        lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.01),
        lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.8, centered=True),
        lambda model: torch.optim.NAdam(model.parameters(), lr=0.05, weight_decay=0.5, decoupled_weight_decay=True),
        lambda model: Lion(model.parameters(), lr=0.01),
    ],
    ids=["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "Lion"],
)
def test_a_torch_optimizer_steps_in_the_engine_as_in_plain_pytorch(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    """The optimizer overrides that of the configuration. torch's scheduler sets the learning rates."""
    data = torch.randn(16, 3)
    plain = net()
    optimizer = make(plain)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    def step(rows: Tensor) -> None:
        plain(rows).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    expected = weights_after(plain, data, step)
    model = net()
    torch_optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, lambda step: 1 / (step + 1))
    file = {"gradient_clipping": 0, "optimizer": {"type": "Lion"}}
    engine, stepped, loader, rates = initialize(
        model=model, optimizer=torch_optimizer, config=file, lr_scheduler=scheduler
    )
    assert isinstance(engine, Engine) and stepped is engine.optimizer and loader is None

    def engine_step(rows: Tensor) -> None:
        engine.backward(engine(rows).square().mean())
        engine.step()

    for ours, wanted in zip(weights_after(engine.module, data, engine_step), expected, strict=True):
        torch.testing.assert_close(ours, wanted)
    assert rates.get_last_lr() == [pytest.approx(torch_optimizer.defaults["lr"] / 4)] * len(stepped.param_groups)


def test_the_four_values_of_a_configuration() -> None:
    """Check the loader's batch size and the file's schedule. `args` names the configuration."""
    file = {
        "train_micro_batch_size_per_gpu": 3,
        "dataloader_drop_last": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
    }
    model, data = net(), TensorDataset(torch.arange(24.0).view(8, 3))
    parameters = model.parameters()
    engine, optimizer, loader, rates = initialize(
        args=SimpleNamespace(deepspeed_config=file), model=model, model_parameters=parameters, training_data=data
    )
    batches = [rows for (rows,) in loader]
    assert [len(rows) for rows in batches] == [3, 3]
    seen = []
    for rows in [*batches, *batches]:
        engine.backward(engine(rows).square().mean())
        engine.step()
        rates.step()  # some training loops make this call, but the engine advances the schedule
        seen.append(rates.get_last_lr()[0])
    assert seen == pytest.approx([0.0, 0.0, 0.05, 0.1])
    assert optimizer is engine.optimizer
    frozen = initialize(net(), {"zero_optimization": {"stage": 3}}, dist_init_required=True)
    assert [type(value) for value in frozen] == [Engine, type(None), type(None), type(None)]
    assert isinstance(initialize(net(), file), Engine)


def test_callables_make_optimizer_and_scheduler() -> None:
    engine, _, _, rates = initialize(
        model=net(),
        config={},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    results = []
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        results.append(engine.step().lr)
    assert results == [0.5, 0.25, 0.125] and rates.get_last_lr() == [0.125]


def test_an_engine_configuration_takes_a_torch_optimizer() -> None:
    model = net()
    engine = initialize(model, EngineConfig(dtype="fp32"), optimizer=torch.optim.AdamW(groups_of(model), lr=0.1))
    assert isinstance(engine, Engine)
    assert engine.optimizer_config == OptimizerConfig(
        lr=0.1, schedule="constant", betas=(0.9, 0.999), weight_decay=0.1, decay="matrices", max_grad_norm=0.0
    )


class CustomOptimizer(torch.optim.Optimizer):
    """An optimizer that torch does not contain."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def split(model: nn.Module, first: dict[str, Any], second: dict[str, Any]) -> torch.optim.Optimizer:
    head, *others = model.parameters()
    return torch.optim.AdamW([{"params": [head], **first}, {"params": others, **second}], lr=0.1)


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "class": (
        lambda m: CustomOptimizer(m.parameters()),
        "optimizer: .*CustomOptimizer is not of torch.optim; write OptimizerConfig",
    ),
    "unfit": (lambda m: torch.optim.LBFGS(m.parameters()), "evaluates the loss several times"),
    "states": (stepped, "it has taken steps, whose states would be lost; pass a new optimizer"),
    "rates": (lambda m: split(m, {"lr": 1.0}, {}), r"groups differ in lr \(\[1.0, 0.1\]\); write one value"),
    "decay": (lambda m: split(m, {"weight_decay": 0.0}, {}), r"differ in weight_decay \(\[0.0, 0.01\]\); write one"),
    "missing": (lambda m: torch.optim.SGD(m[0].parameters()), r"4 trainable parameters are missing \(1.weight, ...\)"),
    "others": (
        lambda m: torch.optim.SGD([*m.parameters(), *net().parameters()]),
        "has parameters that are frozen or not of this model; remove",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_optimizer_that_cannot_be_translated_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    model = net()
    with pytest.raises(ValueError, match=message):
        optimizer_config(make(model), model)


def test_arguments_that_do_not_go_together_are_refused() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"arguments of deepspeed.initialize need a DeepSpeed configuration: config="):
        initialize(model, EngineConfig(), model_parameters=model.parameters())
    with pytest.raises(ValueError, match=r"model_parameters: 4 trainable parameters are missing"):
        initialize(model, {"optimizer": {"type": "Adam"}}, model_parameters=model[0].parameters())
    with pytest.raises(ValueError, match=r"training_data needs a batch size; write train_micro_batch_size_per_gpu"):
        initialize(model, {}, training_data=TensorDataset(torch.ones(2, 3)))
    with pytest.raises(ValueError, match=r"lr_scheduler: there is no optimizer to schedule"):
        initialize(net(), {}, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_a_scheduler_that_was_not_passed_is_refused() -> None:
    """Steps of this scheduler would change only the optimizer that the engine replaces."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for config in ({}, EngineConfig(dtype="fp32")):
        with pytest.raises(ValueError, match=r"optimizer: a scheduler of torch sets.*lr_scheduler=, or .* scheduler="):
            initialize(model, config, optimizer=optimizer)
    initialize(model, EngineConfig(dtype="fp32"), optimizer=optimizer, scheduler=lambda step: scheduler.base_lrs[0])


def test_schedulers_that_do_more_than_count_steps_are_refused() -> None:
    """The engine takes only learning rates from a scheduler."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    with pytest.raises(ValueError, match=r"lr_scheduler: OneCycleLR also cycles the momentum.*cycle_momentum=False"):
        initialize(model, {}, optimizer=optimizer, lr_scheduler=scheduler)
    with pytest.raises(ValueError, match=r"lr_scheduler: ReduceLROnPlateau needs a metric at each step"):
        initialize(model, {}, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
