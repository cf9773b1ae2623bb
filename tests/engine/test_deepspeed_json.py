"""DeepSpeed configurations: every key is known, supported keys have their effect, and mistakes are refused."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine import EngineConfig, OptimizerConfig, deepspeed_json, initialize
from engine.config import LossScale
from engine.deepspeed_json import parse
from engine.deepspeed_keys import KEYS, OPTIMIZERS, SCHEDULERS
from engine.parallel import dtensors

OWN = OptimizerConfig(lr=3e-4, total_steps=50, warmup_steps=5, weight_decay=0.2)

CHAT = {
    # The configuration that DeepSpeed-Chat writes for its actor in step 3.
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "fp16": {"enabled": True, "loss_scale_window": 100},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": True, "max_out_tokens": 512, "inference_tp_size": 1, "release_inference_cache": False,
        "pin_parameters": True, "tp_gather_partition_size": 8,
    },
    "tensorboard": {"enabled": False, "output_path": "x/", "job_name": "y"},
}  # fmt: skip


def test_a_deepspeed_chat_configuration() -> None:
    actual = parse(CHAT, ranks=4)
    assert actual.engine == EngineConfig(
        zero_stage=3,
        dtype="fp16",
        offload_optimizer="cpu",
        offload_parameters="cpu",
        gradient_accumulation=2,
        loss_scale=LossScale(window=100),
    )
    assert (actual.micro_batch_size, actual.optimizer) == (4, None)
    message = "\n".join(actual.ignored)
    assert "stage3_max_live_parameters has no effect" in message and "loss_scale_window" not in message
    assert "wall_clock_breakdown" not in message  # false is the default, so nothing is ignored


def test_defaults_are_deepspeeds() -> None:
    actual = parse({"optimizer": {"type": "Adam"}})
    assert actual.engine == EngineConfig(zero_stage=0, dtype="fp32")
    assert actual.optimizer == OptimizerConfig(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0, name="adamw", decay="all",
        schedule="constant",
    )  # fmt: skip
    scale = parse({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}).engine.loss_scale
    assert scale == LossScale(initial_power=16, window=1000, hysteresis=2, minimum=1.0, refill=False, static=None)
    assert parse({"fp16": {"enabled": True}}).engine.loss_scale.hysteresis == 1  # stage 0 has no hysteresis


def test_explicit_values_override_ours_and_auto_does_not() -> None:
    file = {
        "zero_optimization": {"stage": "auto"},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9], "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
    }
    actual = parse(file, optimizer=OWN, base=vars(EngineConfig(zero_stage=2, dtype="bf16", compile_blocks=True)))
    assert actual.engine == EngineConfig(zero_stage=2, dtype="bf16", compile_blocks=True)
    assert actual.optimizer is not None and actual.scheduler is not None
    assert (actual.optimizer.lr, actual.optimizer.betas, actual.optimizer.weight_decay) == (3e-4, (0.8, 0.9), 0.2)
    assert (actual.optimizer.max_grad_norm, actual.optimizer.decay) == (0.5, "matrices")
    assert actual.scheduler(6) == pytest.approx(3e-4)  # iteration 5: five warm-up steps are done
    assert actual.scheduler(51) == 0.0
    neither = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    assert parse(neither, base=vars(EngineConfig(dtype="bf16"))).engine.dtype == "fp32"
    assert parse({}, optimizer=OWN).optimizer == OWN


def test_one_bit_adam() -> None:
    params = {"lr": 4e-4, "freeze_step": 23, "comm_backend_name": "gloo"}
    actual = parse({"optimizer": {"type": "OneBitAdam", "params": params}}).optimizer
    assert actual is not None
    assert (actual.name, actual.lr, actual.betas) == ("onebitadam", 4e-4, (0.9, 0.999))
    assert actual.options == {"freeze_step": 23}


@pytest.mark.parametrize(
    ("weights", "gradients", "expected"),
    [(True, True, "both"), (True, None, "gather8"), (None, True, "reduce8"), (False, False, "none")],
)
def test_quantized_keys(weights: bool | None, gradients: bool | None, expected: str) -> None:
    keys = {"zero_quantized_weights": weights, "zero_quantized_gradients": gradients}
    file = {"zero_optimization": {"stage": 3} | {key: value for key, value in keys.items() if value is not None}}
    assert parse(file).engine.compress == expected


def test_layout_keys() -> None:
    file = {
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "communication_data_type": "bf16",
        "activation_checkpointing": {"partition_activations": True},
        "bfloat16": {"enabled": True},
        "fp16": {"loss_scale": 128, "consecutive_hysteresis": True},
    }
    engine = parse(file).engine
    assert (engine.shard_ranks, engine.reduce_dtype, engine.activation_checkpointing) == (2, "bf16", True)
    assert engine.dtype == "bf16" and engine.loss_scale.static == 128.0 and engine.loss_scale.refill


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((32, 4, None), (4, 2)),
        ((32, None, 2), (4, 2)),
        ((None, 4, 2), (4, 2)),
        ((32, None, None), (8, 1)),
        ((None, 4, None), (4, 1)),
        ((32, 4, 2), (4, 2)),
        ((None, None, 3), (None, 3)),
    ],
)
def test_batch_triple_on_four_ranks(given: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    actual = parse({name: value for name, value in zip(names, given, strict=True) if value is not None}, ranks=4)
    assert (actual.micro_batch_size, actual.engine.gradient_accumulation) == expected


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def adamw(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": ADAMW, "scheduler": {"type": kind, "params": params}}


warm_up = partial(schedule, "WarmupLR")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, "=30 is not .* 1 ranks; write .*size=28"),
        ({"zero_optimisation": {"stage": 2}}, r"did you mean zero_optimization\?"),
        ({"zero_optimization": {"ofload_param": {}}}, r"did you mean zero_optimization.offload_param\?"),
        ({"zero_optimization": {"stag": 2}}, r"zero_optimization.stag: .*did you mean zero_optimization.stage\?"),
        ({"zero_optimization": {"loss_scale_window": 2}}, r"did you mean fp16.loss_scale_window\?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4 is not supported; write one of 0, 1, 2, 3"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled="yes": write true or false'),
        ({"gradient_clipping": True}, "write a number"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, "device=disk .*write .* nvme"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}}}, "needs .*stage=3, not 2"),
        ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, "zero_quantized_weights=true"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "needs zero_stage=1"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true; keep one"),
        ({"amp": {"enabled": True}}, "write bf16.enabled=true or fp16.enabled=true"),
        ({"hybrid_engine": {"inference_tp_size": 2}}, "write 1$"),
        ({"optimizer": {"type": "ZeroOneAdam"}}, "no optimizer ZeroOneAdam. Use one of .*onebitadam"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"amsgrad": True}}}, "amsgrad=true is .* write false"),
        ({"optimizer": {"type": "Lamb"}}, "type=Lamb: there is no optimizer Lamb. Use one of .*adamw"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing"),
        (adamw(beta=1), r"params.beta: .* mean optimizer.params.betas\?"),
        (adamw(max_grad_norm=2), "write gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction=false .* write true"),
        ({"scheduler": {"type": "WarmupLR"}}, "no optimizer to schedule"),
        (schedule("WarmupRL"), "type=WarmupRL is .*; write one of WarmupLR, "),
        (schedule("WarmupDecayLR"), "total_num_steps is missing .*write a number"),
        (warm_up(warmup_steps=1), "did you mean scheduler.params.warmup_num_steps"),
        (warm_up(warmup_type="sine"), "warmup_type=sine is not supported; write one of log, linear"),
        (warm_up(warmup_num_steps="few"), r'warmup_num_steps="few": write a whole number, at least 0'),
        ({"bf16": True}, r"bf16=true: write a section"),
        ({"zero_optimization": {"offload_optimizer": True}}, r"offload_optimizer=true: write a section"),
        ({"optimizer": "AdamW"}, r'optimizer="AdamW": write a section'),
        ({"optimizer": {"type": "Adam", "params": []}}, r"optimizer.params=\[\]: write a section"),
        (adamw(lr=-1), r"optimizer.params.lr=-1: write a number, at least 0"),
        (adamw(lr="fast"), r'optimizer.params.lr="fast": write a number'),
        (adamw(betas=0.9), r"optimizer.params.betas=0.9: write two numbers"),
        (adamw(betas=[0.9, 1.0]), r"betas must be at least 0 and below 1, not \(0.9, 1.0\)"),
        (schedule("OneCycle"), r"type=OneCycle is not .*; write .*WarmupCosineLR, or .*lr_scheduler=torch.*OneCycleLR"),
        (schedule("WarmupDecayLR", total_num_steps=0), "total_num_steps=0: write a whole number, at least 1"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, r"fp16: window and hysteresis must be at least 1"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2000}}, r"fp16: .* from 0 to 32, not 2000"),
        ({"fp16": {"enabled": True, "loss_scale": -3}}, r"fp16: a loss scale must be above 0, not -3"),
        ({"gradient_clipping": -1}, r"gradient_clipping=-1: write a number, at least 0"),
        ({"train_batch_size": float("inf")}, r"train_batch_size=Infinity: write a whole number"),
    ],
)  # fmt: skip
def test_invalid_configurations_are_refused_with_a_correction(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(file)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    with pytest.raises(ValueError, match="there is no such file"):
        parse(file)
    file.write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(ValueError, match="stage occurs twice"):
        parse(file)
    for text, reason in (
        ("{,}", "Expecting"),
        (f'{{"a": {"1" * 5000}}}', "value has 5000 digits$"),
        ("[" * 99999, "recurs"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"is not JSON: .*{reason}"):
            parse(file)
    file.write_text(json.dumps(CHAT))
    assert parse(file, ranks=4) == parse(CHAT, ranks=4)
    file.write_text('# how\n{"a": "/* # // */ \\" //", // why\n /* two\nlines */ "b": 2}')
    assert deepspeed_json._raw(file) == {"a": '/* # // */ " //', "b": 2}


def test_optimizers_and_their_options() -> None:
    def chosen(kind: str, **params: Any) -> OptimizerConfig:
        actual = parse({"optimizer": {"type": kind, "params": params}}).optimizer
        assert actual is not None
        return actual

    assert chosen("adam", adam_w_mode=False).name == "adam" and chosen("AdamW", adam_w_mode=False).name == "adamw"
    assert chosen("Adam", torch_adam=True).name == "adamw"
    assert chosen("Adam", torch_adam=True, adam_w_mode=False).name == "adam"
    assert chosen("LION", lr=2e-4).betas == (0.9, 0.999)
    assert chosen("adagrad").lr == 1e-2 and chosen("adagrad").options == {"eps": 1e-10}
    assert chosen("SGD", momentum=0.9).options == {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
    assert chosen("NAdam", lr=1.0, betas=[0.8, 0.9]).options == {"betas": (0.8, 0.9)}


def test_a_file_configures_a_training_loop() -> None:
    """A rising learning rate and two micro-batches for each step equal plain PyTorch with explicit numbers."""
    file = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.04, "warmup_num_steps": 3, "warmup_type": "linear"},
        },
    }
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.1)
    engine = initialize(model, file)
    for rate in (0.01, 0.01, 0.02, 0.03):  # the first step is before DeepSpeed's first iteration
        halves = torch.randn(8, 3).chunk(2)
        for half in halves:
            engine.backward(engine(half).square().mean())
            done = engine.step()
        (sum(plain(half).square().mean() for half in halves) / 2).backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        assert done is not None and done.lr == pytest.approx(rate)
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(dtensors.full_tensor(ours.detach()), theirs)


def test_the_page_lists_every_key_and_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "deepspeed.md").read_text()
    text = page.partition("## Supported keys\n")[2]  # the table before it lists methods
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    listed = {name: row for row in rows for name in re.findall("`([a-z0-9_.]+)`", row[0])}
    assert listed.keys() == KEYS.keys()
    for name, key in KEYS.items():
        assert key.kind == "ignored" or listed[name][-1] == key.note or listed[name][1] == key.kind, name
        assert not key.choices or listed[name][-1].endswith(f"one of {', '.join(map(str, key.choices))}"), name
    parameters = {row[0]: dict(each.split("` ") for each in row[1][1:].split(", `") if "` " in each) for row in rows}
    for kind, defaults in (OPTIMIZERS | SCHEDULERS).items():
        shown = {name: f"{value:g}" if type(value) is float else str(value) for name, value in defaults.items()}
        assert parameters[kind] == {n: v.lower() for n, v in shown.items() if v != "None"}


def test_names_and_values_of_public_files() -> None:
    """Keys of ZeRO-3 without `stage3_`, a sub-group for each parameter, and a section that switches itself off."""
    zero = {"stage": 3, "sub_group_size": 0, "max_live_parameters": 0, "gather_16bit_weights_on_model_save": True}
    for off in ({"disable": True, "backend": "inductor"}, {"deepcompile": False}):
        actual = parse({"zero_optimization": zero, "compile": off})
        assert actual.engine == EngineConfig(zero_stage=3, dtype="fp32", sub_group_size=1024)
        assert actual.ignored == tuple(
            f"zero_optimization.stage3_{name} has no effect (see docs/reference/deepspeed.md)"
            for name in ("max_live_parameters", "gather_16bit_weights_on_model_save")
        )
    with pytest.raises(ValueError, match=r"compile=.*is not supported: write EngineConfig"):
        parse({"compile": {"deepcompile": True}})


def test_offload_sections() -> None:
    section = {
        "stage": 3, "sub_group_size": 4e6,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "ratio": 0.5, "buffer_count": 5},
        "offload_param": {"device": "nvme", "nvme_path": "/disk", "pin_memory": True, "max_in_cpu": 1e8},
    }  # fmt: skip
    actual = parse({"zero_optimization": section, "aio": {"block_size": 262144, "thread_count": 2}})
    assert actual.engine == EngineConfig(
        zero_stage=3, dtype="fp32", offload_optimizer="nvme", offload_parameters="nvme", offload_ratio=0.5,
        nvme_path="/disk", sub_group_size=4_000_000,
    )  # fmt: skip
    message = "\n".join(actual.ignored)
    assert "aio has no effect" in message and "offload_optimizer.buffer_count has no effect" in message
    own = EngineConfig(zero_stage=2, offload_optimizer="cpu", nvme_path="/mine")
    assert parse({"zero_optimization": {"overlap_comm": True}}, base=vars(own)).engine == own
    section["offload_param"]["nvme_path"] = "/other"  # type: ignore[index]
    with pytest.raises(ValueError, match="nvme_path differ"):
        parse({"zero_optimization": section})
