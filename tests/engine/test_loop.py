"""The engine in a user's training loop: modules of many kinds on one and two ranks, against plain PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForSequenceClassification

from engine import Engine, EngineConfig, OptimizerConfig, initialize
from engine.parallel import dist
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

STEPS, ROWS = 3, 8
# eps is larger than usual: with a tiny gradient, Adam's step depends on the gradient's sign, which rounding may change.
EPS = 1e-5
OPTIMIZER = OptimizerConfig(lr=0.02, betas=(0.9, 0.999), eps=EPS, weight_decay=0.01, decay="all", max_grad_norm=0.0)


class ConvNet(nn.Module):
    """A small vision model with group norm, because batch statistics would depend on the rank's share of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU()
        )
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))


class Chain(nn.Module):
    """Blocks that are the same module, share a weight, or are in nested lists."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 5), nn.Linear(5, 1)
        blocks = [nn.Linear(5, 5) for _ in range(4)]
        if kind == "looped":
            blocks = blocks[:1] * 3
        elif kind == "shared":
            blocks[3].weight = blocks[0].weight
        self.groups = nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])])
        if kind == "shared":
            self.groups = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for group in self.groups:
            for block in group if isinstance(group, nn.ModuleList) else [group]:
                x = x + torch.tanh(block(x))
        return self.head(x)


def mixtral() -> nn.Module:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    experts = {"num_key_value_heads": 1, "vocab_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("mixtral", max_position_embeddings=32, **shape, **experts)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


def bert() -> nn.Module:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return BertForSequenceClassification(
        BertConfig(vocab_size=50, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape)
    )


def regression_loss(model: Callable[..., Any], x: Tensor, seed: int) -> Tensor:
    return F.mse_loss(model(x), x.sum(1, keepdim=True) + seed)


def classes(rows: Tensor, kinds: int) -> Tensor:
    return rows.flatten(1).sum(1).long() % kinds


def bert_loss(model: Callable[..., Any], x: Tensor, seed: int) -> Tensor:
    return model(input_ids=x, attention_mask=(x > 4).long(), labels=classes(x, 3)).loss


def token_loss(model: Callable[..., Any], x: Tensor, seed: int) -> Tensor:
    return model(input_ids=x, labels=x, use_cache=False).loss


def image_loss(model: Callable[..., Any], x: Tensor, seed: int) -> Tensor:
    return F.cross_entropy(model(x), classes(x * 10, 4))


def rows_of(kind: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if kind in ("bert", "mixtral"):
        return torch.randint(0, 48, (ROWS, 7), generator=generator)
    return torch.randn(*((ROWS, 3, 8, 8) if kind == "image" else (ROWS, 6)), generator=generator)


MAKE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 1),
    "bert": bert,
    "image": ConvNet,
    "looped": lambda: Chain("looped"),
    "shared": lambda: Chain("shared"),
    "nested": lambda: Chain("nested"),
    "mixtral": mixtral,
}
LOSS = {"bert": bert_loss, "image": image_loss, "mixtral": token_loss}
# The layouts of each kind on two ranks: every ZeRO stage for the weight that blocks share.
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "linear": [{"zero_stage": 1, "gradient_accumulation": 2}],
    "bert": [{"zero_stage": 2, "gradient_accumulation": 2}, {"zero_stage": 3, "shard_ranks": 1}],
    "image": [{"zero_stage": 0}],
    "looped": [{"zero_stage": 1}, {"zero_stage": 3, "activation_checkpointing": True}],
    "shared": [{"zero_stage": stage, "activation_checkpointing": True} for stage in range(4)],
    "nested": [{"zero_stage": 2}, {"zero_stage": 3, "activation_checkpointing": True}],
    "mixtral": [{"zero_stage": 0}, {"zero_stage": 3}],
}


def loss_of(kind: str, model: Callable[..., Any], rows: Tensor, step: int) -> Tensor:
    return LOSS.get(kind, regression_loss)(model, rows, step)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(4)
    return MAKE[kind]()


def plain(kind: str) -> dict[str, Tensor]:
    """Train with a plain PyTorch loop."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01, eps=EPS)
    for step in range(STEPS):
        loss_of(kind, model, rows_of(kind, step), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_of(kind: str, **layout: Any) -> Engine:
    return initialize(model_of(kind), EngineConfig(dtype="fp32", **layout), optimizer=OPTIMIZER)


def train_engine(kind: str, **layout: Any) -> dict[str, Tensor]:
    """Train with the engine. Each rank has its share of the batch, in `gradient_accumulation` micro-batches."""
    engine, accumulation = engine_of(kind, **layout), layout.get("gradient_accumulation", 1)
    world = dist.world()
    for step in range(STEPS):
        steps = []
        for rows in rows_of(kind, step)[world.rank :: world.size].chunk(accumulation):
            engine.backward(loss_of(kind, engine, rows.to(engine.device), step))
            steps.append(engine.step())
        assert [done is None for done in steps] == [True] * (accumulation - 1) + [False]
        assert steps[-1].lr == 0.02 and not steps[-1].skipped
    return full_weights(engine)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        # A gradient that is zero except for rounding (a bias under a softmax over rows) makes Adam step by its sign.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(actual[name], weight, atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "bert", "image"])
def test_one_rank_equals_plain_pytorch(kind: str) -> None:
    assert_close(train_engine(kind), plain(kind))
    assert_close(train_engine(kind, gradient_accumulation=4, zero_stage=3), plain(kind))


def on_two_ranks(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {kind: [train_engine(kind, **each) for each in LAYOUTS[kind]] for kind in MAKE}
    engine = engine_of("bert", zero_stage=3)
    assert engine.load(folder) == {"epoch": 1}
    results |= {"loaded": full_weights(engine), "step": engine.step_count}
    try:
        engine_of("linear", zero_stage=3, shard_ranks=4)
    except ValueError as error:
        results["error"] = str(error)
    return results


def test_training_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    engine = initialize(torch.nn.Linear(2, 1), EngineConfig(dtype="fp32"))
    with pytest.raises(ValueError, match=r"optimizer=OptimizerConfig"):
        engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
    for use in (engine.save, engine.load):
        with pytest.raises(ValueError, match=r"optimizer=OptimizerConfig"):
            use(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"optimizer=OptimizerConfig"):
        engine.update([], lambda module, rows: (torch.zeros(()), {}), 1.0)


def test_two_ranks_equal_plain_pytorch_and_load_one_ranks_checkpoint(tmp_path: Path) -> None:
    engine = engine_of("bert")
    engine.backward(bert_loss(engine, rows_of("bert", 0), 0))
    engine.step()
    engine.save(tmp_path / "saved", {"epoch": 1})
    expected = {kind: plain(kind) for kind in MAKE}
    for actual in run_ranks(on_two_ranks, 2, tmp_path / "saved"):
        for kind in MAKE:
            for weights in actual[kind]:
                assert_close(weights, expected[kind])
        assert_close(actual["loaded"], full_weights(engine), 0.0)
        assert actual["step"] == 1 and "shard_ranks=4 does not divide the 2 ranks" in actual["error"]


OTHERS: list[tuple[str, float, dict[str, Any]]] = [
    ("sgd", 0.0, {"momentum": 0.9, "dampening": 0.1}),
    ("adagrad", 0.1, {}),
    ("RMSprop", 0.0, {"momentum": 0.5}),
    ("nadam", 0.0, {}),
    ("Adamax", 0.0, {}),
    ("ASGD", 0.0, {}),
    ("RAdam", 0.0, {}),
    ("Adadelta", 0.0, {}),
    ("adam", 0.1, {"amsgrad": True}),
    ("lion", 0.1, {}),
]


@pytest.mark.parametrize(("name", "decay", "options"), OTHERS)
def test_any_optimizer_resumes_from_its_checkpoint(
    name: str, decay: float, options: dict[str, Any], tmp_path: Path
) -> None:
    config = OptimizerConfig(lr=0.05, name=name, weight_decay=decay, decay="all", max_grad_norm=0.0, options=options)
    first, second = (initialize(model_of("image"), EngineConfig(dtype="fp32"), optimizer=config) for _ in range(2))
    reference = model_of("image")
    named = {"weight_decay": decay} if decay else {}
    spelt = {"sgd": "SGD", "adagrad": "Adagrad", "nadam": "NAdam", "adam": "Adam"}
    kind = getattr(torch.optim, spelt.get(name, name), None)
    other = kind(reference.parameters(), lr=0.05, **named, **options) if kind else None
    if name == "adam":
        other.param_groups[0]["betas"] = (0.9, 0.95)
    for step in range(4):
        for engine in (first, second) if step >= 2 else (first,):
            engine.backward(image_loss(engine, rows_of("image", step), step))
            engine.step()
        if other is not None:
            image_loss(reference, rows_of("image", step), step).backward()
            other.step()
            other.zero_grad()
        if step == 1:
            first.save(tmp_path / "at-2")
            second.load(tmp_path / "at-2")
    assert_close(full_weights(second), full_weights(first), 0.0)
    if other is not None:
        assert_close(full_weights(first), dict(reference.named_parameters()))


def test_lion_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    config = OptimizerConfig(lr=0.1, name="Lion", betas=(0.5, 0.75), weight_decay=0.2, decay="all", max_grad_norm=0.0)
    engine = initialize(model, EngineConfig(dtype="fp32"), optimizer=config)
    weight, momentum = 1.0, 0.0
    for gradient in (4.0, -1.0, -2.0):  # the second step follows the momentum, against the sign of its gradient
        engine.backward((engine(torch.tensor([[gradient]]))).sum())
        engine.step()
        mixed = 0.5 * momentum + 0.5 * gradient
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * (1 if mixed > 0 else -1 if mixed < 0 else 0)
        momentum = 0.75 * momentum + 0.25 * gradient
        assert full_weights(engine)["weight"].item() == pytest.approx(weight, abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "adamx"}, r"there is no optimizer adamx\. Use one of .*adamw"),
        ({"name": "LBFGS"}, "evaluates the loss several times"),
        ({"name": "Muon"}, "full matrices"),
        ({"name": "Rprop"}, "writes by index"),
        ({"name": "sgd", "options": {"momentun": 0.9}}, r"has no option momentun\. Use one of .*momentum"),
    ],
)
def test_invalid_optimizers_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        initialize(nn.Linear(2, 2), EngineConfig(dtype="fp32"), optimizer=OptimizerConfig(lr=0.1, **keys))


class HalfUsed(nn.Module):
    """A net with batch statistics and with a layer that does not affect the output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.used, self.unused = nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.norm(x))


@pytest.mark.parametrize(
    "layout", [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "offload_optimizer": "cpu"}]
)
def test_running_statistics_and_unused_parameters_are_restored(layout: dict[str, Any], tmp_path: Path) -> None:
    """In bf16, the statistics have the precision of the weights: the kernels of batch norms need this."""

    def made() -> Engine:
        torch.manual_seed(1)
        sgd = OptimizerConfig(lr=0.1, name="sgd", options={"momentum": 0.9})
        return initialize(HalfUsed(), EngineConfig(**layout), optimizer=sgd)

    engine, other = made(), made()
    assert dict(engine.module.named_buffers())["norm.running_var"].dtype == engine.dtype
    engine.backward(engine(torch.randn(5, 3) * 3 + 7).square().mean())
    engine.step()
    engine.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert_close(full_weights(other), full_weights(engine), 0.0)
    for (name, ours), (_, theirs) in zip(other.module.named_buffers(), engine.module.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert float(dict(other.module.named_buffers())["norm.running_mean"].sum()) > 1.0


def test_generating_without_a_rollout_path_is_refused() -> None:
    engine = initialize(nn.Linear(2, 2), EngineConfig())
    with pytest.raises(ValueError, match=r'rollout_path=NAME.* "" for the module itself'), engine.generating():
        pass


def test_a_load_drops_the_gradients_of_an_incomplete_step(tmp_path: Path) -> None:
    expected, engine = engine_of("linear"), engine_of("linear")
    engine.save(tmp_path / "saved")
    engine.backward(100 * regression_loss(engine, rows_of("linear", 1), 1))
    engine.load(tmp_path / "saved")
    for each in (expected, engine):
        each.backward(regression_loss(each, rows_of("linear", 0), 0))
        each.step()
    assert_close(full_weights(engine), full_weights(expected), 0.0)


def test_the_caller_decides_which_micro_batch_is_the_last() -> None:
    """An epoch may end before `gradient_accumulation` micro-batches."""
    engine = engine_of("linear", gradient_accumulation=4, zero_stage=1, offload_optimizer="cpu")
    for last in (False, True):
        engine.backward(regression_loss(engine, rows_of("linear", 0), 0), last=last)
        done = engine.step()
        assert (done is not None) == last
    assert done is not None and done.grad_norm > 0 and engine.step() is None
    for _ in range(4):
        engine.backward(regression_loss(engine, rows_of("linear", 0), 0))
    assert engine.step() is not None
