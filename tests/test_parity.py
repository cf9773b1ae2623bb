"""Each stage logs the same metrics on one rank and on two ranks under ZeRO, tensor and sequence parallelism.

The memory that the stages measure is also compared with the predicted bytes.
"""

import json
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from engine.parallel import dist
from pipeline.config.stages import STAGES
from pipeline.launch.worker import read_config
from tests.ranks import run_ranks
from tests.tiny import CURVES, ROOT, copy_stages, metrics, tiny_config, write_stage_configs

STATES = (
    "parameters",
    "optimizer",
    "gathered",
    "gradients",
    "inference_model",
    "actor",
    "critic",
    "reference",
    "reward",
)
SAMPLED = {"prompts": 4, "temperatures": [1.0], "best_of": 1}
ONE_RANK = [({"zero_stage": 0}, tuple(STAGES))]
# The engine settings of each layout, and the stages that run with them. SFT, reward model and DPO share a loop, so some
# layouts run one of them. tests/engine/test_zero.py compares all ZeRO stages.
LAYOUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"zero_stage": 3}, tuple(STAGES)),
    ({"tensor_parallel": 2}, ("ppo",)),
    ({"sequence_parallel": 2, "zero_stage": 2}, ("dpo", "ppo")),
]
STEPS = {"sft": 2, "reward": 2, "dpo": 2, "ppo": 2}


def run_stages(parent: str, layouts: list[tuple[dict[str, Any], tuple[str, ...]]]) -> None:
    """Run the stages of each layout, on whatever ranks there are.

    A layout without SFT or reward model starts from those of one rank. Adam divides by |gradient| + eps. A larger eps
    than 1e-8 does not turn the rounding of gradients near 0 into steps.
    """
    for number, (layout, stages) in enumerate(layouts):
        run_dir = Path(parent) / f"ranks-{dist.world().size}-layout-{number}"
        sections: dict[str, Any] = {name: {"steps": steps, "eval_examples": 8} for name, steps in STEPS.items()}
        sections["sft"]["batch_size"] = 8
        sections["reward"]["eps"] = 1e-5
        sections["ppo"] = {"steps": STEPS["ppo"], "eps": 1e-5, "ptx_coef": 0.1, "update_epochs": 1}
        config = tiny_config(engine={"dtype": "fp32", **layout}, evaluation=SAMPLED, **sections)
        if dist.is_rank_zero():
            write_stage_configs(run_dir, config)
            if dist.world().size > 1:
                copy_stages(Path(parent) / "ranks-1-layout-0", run_dir, *({"sft", "reward"} - {*stages}))
        dist.barrier()
        for name in stages:
            import_module(f"{STAGES[name].package}.train").run(read_config(run_dir / name), run_dir / name)


def run_ppo(parent: str, layout: int, names: dict[str, bool]) -> None:
    """Run PPO once for each name, from the SFT and reward models of a layout, with one minibatch for each rollout.

    `names` maps the folder of a run to `ppo.shared_forward`. The evaluation adds greedy answers and the best of two.
    """
    trained = Path(parent) / f"ranks-{dist.world().size}-layout-{layout}"
    for name, shared in names.items():
        run_dir = Path(parent) / name
        made = read_config(trained / "ppo")
        own = {"ptx_coef": 0.0, "minibatches": 1, "update_epochs": 2, "micro_batch_tokens": 256}
        ppo = made.ppo.model_copy(update={**own, "shared_forward": shared})
        evaluation = made.evaluation.model_copy(update={"temperatures": None, "best_of": 2})
        made = made.model_copy(update={"ppo": ppo, "evaluation": evaluation})
        if dist.is_rank_zero():
            write_stage_configs(run_dir, made)
            copy_stages(trained, run_dir, "sft", "reward")
        dist.barrier()
        import_module("step3_ppo.train").run(read_config(run_dir / "ppo"), run_dir / "ppo")


def test_ranks_and_layouts_do_not_change_the_metrics(tmp_path: Path) -> None:
    run_ranks(run_stages, 1, str(tmp_path), ONE_RANK)
    run_ranks(run_stages, 2, str(tmp_path), LAYOUTS)
    for number, (layout, stages) in enumerate(LAYOUTS):
        check_memory(tmp_path / f"ranks-2-layout-{number}", str(layout), stages)
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reference" / "outputs.md").read_text()))
    for stage, names in CURVES.items():
        one_rank = metrics(tmp_path / "ranks-1-layout-0", stage)
        assert {name for line in one_rank for name in line} <= documented, "docs/reference/outputs.md lacks a metric"
        assert len(one_rank) == STEPS[stage] + (stage == "ppo")
        for number, (layout, stages) in enumerate(LAYOUTS):
            if stage not in stages:
                continue
            two_ranks = metrics(tmp_path / f"ranks-2-layout-{number}", stage)
            for actual, expected in zip(two_ranks, one_rank, strict=True):
                # DPO's first step compares the policy with itself: rounding decides the signs of its margins.
                is_tie = stage == "dpo" and abs(expected["margin"]) < 1e-6
                assert not is_tie or abs(actual["margin"]) < 1e-5, (stage, layout)
                for name in set(names) & set(expected) - ({"accuracy"} if is_tie else set()):
                    assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), (stage, layout, name)
    run_ranks(run_ppo, 1, str(tmp_path), 0, {"separate_forwards": False})
    run_ranks(run_ppo, 2, str(tmp_path), 0, {"shared_forwards": True})
    check_memory(tmp_path / "shared_forwards", "shared forwards", ("ppo",))
    lines = (metrics(tmp_path / name, "ppo") for name in ("shared_forwards", "separate_forwards"))
    for actual, expected in zip(*lines, strict=True):
        for name in set(CURVES["ppo"]) & set(expected):
            assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name


def check_memory(run_dir: Path, layout: str, stages: Iterable[str]) -> None:
    """Compare measured with predicted bytes: states and inference weights agree, the rest is below the prediction."""
    for stage in stages:
        memory = json.loads((run_dir / stage / "summary.json").read_text())["memory"]
        assert memory["measured"].keys() == memory["predicted"].keys()
        for phase, measured in memory["measured"].items():
            predicted = memory["predicted"][phase]
            for owner in {*measured, *(predicted.keys() & {*STATES})}:
                expected, actual = predicted.get(owner, 0), measured.get(owner, 0)
                where = (layout, stage, phase, owner)
                if owner in STATES:
                    assert actual == pytest.approx(expected, rel=0.03, abs=2**13), where
                else:
                    assert actual <= 1.2 * expected, (where, actual, expected)
