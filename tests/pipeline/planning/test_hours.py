"""The plan in hours: its table for this machine and for named GPUs, the data's size, and the offered settings."""

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from engine.memory import GPUS
from pipeline.config.schema import PlanSection, RunConfig
from pipeline.data.encode import PairItem, PromptItem, TokenItem
from pipeline.errors import UserError
from pipeline.files import read_plan
from pipeline.installation import CONF
from pipeline.launch import command
from pipeline.launch.failure import StageEnd
from pipeline.planning import hours, planner
from pipeline.planning.candidates import Capacity
from pipeline.planning.data_size import DataSize, data_sizes, later_size, size_of
from pipeline.planning.hours import Machine, describe, format_time
from pipeline.planning.stage_task import PlanInputs, stage_task
from tests.pipeline.planning.test_candidates import RATES
from tests.pipeline.planning.test_planner import GIB, source
from tests.tiny import tiny_config

SIZES = {stage: DataSize(1600, 40.0, 10.0, "counted by hand") for stage in ("sft", "reward", "ppo")}
OPT = {**yaml.safe_load((CONF / "model" / "opt-1.3b.yaml").read_text()), "tensor_plan": None}


def h100(config: RunConfig, ranks: int = 1, **sizes: DataSize) -> list[str]:
    machine = Machine(Capacity(78 * GIB, hours.UNLIMITED, hours.UNLIMITED, is_gpu=True), ranks, "h100")
    return describe(config, machine, sizes or SIZES)


def test_hours_are_steps_times_seconds_and_cost_money(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT-1.3B, 25 steps of 64 sequences of 50 tokens; the price is that of two GPUs."""
    config = tiny_config(
        model=OPT,
        engine={"dtype": "bf16"},
        sft={"batch_size": 64, "steps": None, "eval_examples": 1},
        plan={"price_per_gpu_hour": 9},
    )
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"prompts": 1})})
    monkeypatch.setattr(hours, "tabulated_rates", lambda *_, **__: replace(RATES, forward=1e-10, backward=2e-10))
    lines = h100(config, 2, sft=SIZES["sft"])
    row = next(line for line in lines if line.startswith("  sft")).split()
    assert row[1:3] == ["25", "3,200"]
    # 32 sequences on each GPU, 1.2 B parameters in blocks; then the head, an all-reduce and AdamW.
    parameters, blocks = 1_315_758_080, 24 * 50_358_272
    step = 1600 * (blocks * 3e-10 + 1e-4) + parameters * 1e-9
    assert float(row[3]) == pytest.approx(step, rel=0.01)
    cost = next(line for line in lines if line.startswith("  cost"))
    assert float(cost.split()[1].replace(",", "")) == pytest.approx(9 * 2 * 25 * step / 3600, rel=0.02)
    assert any("tabulated, not measured: data sheet of h100" in line for line in lines)
    assert any("1,600 examples, counted by hand; 50 tokens a sequence" in line for line in lines)


def test_at_most_three_settings_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = h100(tiny_config(model=OPT, engine={"dtype": "bf16", "zero_stage": 0}), 4)
    start = lines.index("  worth choosing between:")
    rows = [line.split() for line in lines[start + 1 : start + 5] if line.startswith("      ")]
    assert 2 <= len(rows) <= 3
    memory = [float(row[2]) for row in rows]
    assert memory == sorted(memory, reverse=True) and memory[1] <= 0.85 * memory[0]
    large = {**OPT, "architecture": {**OPT["architecture"], "hidden_size": 9216, "num_hidden_layers": 64}}
    text = "\n".join(h100(tiny_config(model=large, engine={"dtype": "bf16"}, ppo={"micro_batch_tokens": 1024})))
    reason, table = "do not fit; the table shows the first setting that is worth choosing", "  stage      steps"
    assert reason in text.partition(table)[0] and "offload_optimizer=cpu" in text
    monkeypatch.setattr(hours, "UNLIMITED", GIB)
    text = "\n".join(h100(tiny_config(model=large, engine={"dtype": "bf16"})))
    assert "ppo does not fit with any engine setting on 1 x h100" in text and "worth choosing" not in text
    assert "2 or 4 ranks with 78.00 GiB each do not fit either" in text  # 65e9 parameters, 16 bytes each


def test_the_plan_names_the_smallest_number_of_gpus_on_which_all_stages_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """PPO of 17e9 parameters, in GPUs without host memory and disk. The remedy equals the plans of 4 and 8 GPUs."""
    monkeypatch.setattr(hours, "UNLIMITED", GIB)
    large = {**OPT, "architecture": {**OPT["architecture"], "hidden_size": 9216, "num_hidden_layers": 16}}
    sections = {"sft": {"batch_size": 64}, "reward": {"batch_size": 64}, "ppo": {"minibatches": 1, "batch_size": 64}}
    config = tiny_config(model=large, engine={"dtype": "bf16"}, plan={"device": "h100"}, **sections)
    text = {ranks: "\n".join(h100(config, ranks)) for ranks in (1, 4, 8)}
    for ranks in (1, 4):
        assert f"ppo does not fit with any engine setting on {ranks} x h100" in text[ranks]
        assert "use 8 ranks with 78.00 GiB each (plan.ranks=8), adapters (ppo.lora.rank=16)" in text[ranks]
    assert "does not fit" not in text[8] and "worth choosing" in text[8]


def test_the_plan_of_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of the demo are counted. Without a reward model, the reward stage has no plan."""
    monkeypatch.setattr(hours, "measure", lambda *_: RATES)
    for words in ({}, {"reward_model": False, "reward_function": "mine.py:score"}):
        hours.run(tiny_config(ppo=words), Path())
        output = capsys.readouterr().out
        assert ("\n  reward " in output) == (not words)
        assert "measured now on this machine" in output and "examples, counted in demo; " in output
        assert "settings as configured do not fit" not in output and "generate" in output


def test_recorded_and_assumed_sizes() -> None:
    """The rows of a hub data set are divided 0.2 : 0.4 : 0.4. Without an evaluation split, 5 % are held out."""
    size = {"rows": 1000, "prompt_tokens": 30, "answer_tokens": 70}

    def sizes(**source: Any) -> dict[str, DataSize]:
        config = tiny_config(data={"name": "mine", "sources": [{"hub": "a/b", **source}]})
        return data_sizes(config, source.get("stages", ["sft", "reward", "ppo"]))

    assert {stage: each.rows for stage, each in sizes(size=size, eval_split="test").items()} == {
        "sft": 200,
        "reward": 400,
        "ppo": 400,
    }
    held_out = sizes(size=size, stages=["sft", "reward"])["sft"]
    assert (held_out.rows, held_out.prompt, held_out.answer) == (round(1000 * 0.95 / 3), 30, 70)
    assert "recorded in conf/data/mine.yaml" in held_out.origin
    assert sizes()["ppo"] == DataSize(50_000, origin=sizes()["ppo"].origin) and "assumed" in sizes()["ppo"].origin


def test_the_answers_of_pairs_count_if_the_loss_reads_answers() -> None:
    """KTO learns from both answers of a pair, so the demo's pairs make twice as many rows."""
    pairs, answers = (data_sizes(tiny_config(dpo={"loss": loss}), ["dpo"])["dpo"] for loss in ("sigmoid", "kto"))
    assert answers.rows == 2 * pairs.rows > 0
    assert answers.answer == pytest.approx(pairs.answer, rel=0.1)


def test_every_option_of_conf_data_has_a_size() -> None:
    for file in (CONF / "data").glob("*.yaml"):
        for entry in yaml.safe_load(file.read_text())["sources"]:
            assert "size" in entry or "hub" not in entry, f"{file.name}: a hub set without a recorded size"


def test_the_named_gpus_are_those_of_the_table() -> None:
    literal = next(kind for kind in get_args(PlanSection.model_fields["device"].annotation) if kind is not type(None))
    assert set(get_args(literal)) == set(GPUS)


def test_mistakes_name_the_key() -> None:
    with pytest.raises(UserError, match=r"heads of opt-1\.3b: 32 query heads"):
        h100(tiny_config(model=OPT, engine={"tensor_parallel": 5}), 5)


def test_times_have_a_unit() -> None:
    assert [format_time(seconds) for seconds in (0.25, 38, 270, 44280)] == ["0.25 s", "38 s", "4.5 min", "12.3 h"]


def test_the_size_of_encoded_examples() -> None:
    """Means over examples; the rows of PPO are twice those of SFT (0.4 and 0.2 of the prompts)."""
    rows = ([1, 2, 3, 4], [False, False, False, True]), ([1, 2], [False, True])
    assert size_of([TokenItem(np.array(ids), np.array(counts)) for ids, counts in rows]) == DataSize(2, 2.0, 1.0)
    pair = PairItem(np.array([1, 2, 3]), np.array([1, 2, 4, 5, 6]), 0.0, "a", 2)
    assert size_of([pair]) == DataSize(1, 2.0, 2.0)
    assert size_of([PromptItem(array("i", [1, 2, 3]))]) == DataSize(1, 3.0)
    assert later_size(tiny_config(), "sft", DataSize(10, 2.0, 1.0), "ppo") == DataSize(20, 2.0, 1.0)


def test_a_stage_writes_its_plan_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later stages of a run take as long as their own plans; a restarted stage does not measure again."""
    monkeypatch.setattr(planner, "measure", lambda *_, **__: RATES)
    size = DataSize(100, 40.0, 10.0)
    planner.fit_settings(tiny_config(), "sft", tmp_path, PlanInputs(source(), size=size))
    record = read_plan(tmp_path)
    step = sum(record["seconds"].values())
    assert record["stage_seconds"] > 8 * step > 0 and record["answer_tokens"] == 10.0
    assert record["auto"] == {"engine.dtype": "fp32", "model.attention": "sdpa"}
    later = 0.0
    for number, stage in enumerate(("reward", "ppo")):
        folder = tmp_path / stage
        folder.mkdir()
        planner.fit_settings(tiny_config(), stage, folder, PlanInputs(source(), size=replace(size, rows=200)))
        found = read_plan(folder)
        later += found["stage_seconds"]
        assert (found["later_seconds"] == 0.0) == (number == 1)
    assert record["later_seconds"] == pytest.approx(later, rel=0.05)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(planner, "measure", again)
    planner.fit_settings(tiny_config(), "sft", tmp_path, PlanInputs(source(), size=size))
    assert read_plan(tmp_path) == record


@pytest.mark.parametrize(
    ("stage", "held_out", "answered", "scored"),
    [("sft", None, 32, 256), ("sft", 3, 12, 3), ("dpo", 3, 12, 2 * (6 + 3 + 64)), ("ppo", 3, 21, 21)],
)
def test_evaluations_use_the_held_out_rows_that_exist(
    stage: str, held_out: int | None, answered: int, scored: int
) -> None:
    """A small file has fewer held-out rows than `evaluation.prompts` (8) and `eval_examples` (256).

    PPO answers 3 prompts at 2 temperatures before and after training, and 3 times more for the best of 4.
    """
    size = DataSize(100, 40.0, 10.0, held_out=held_out)
    task = stage_task(tiny_config(), stage, PlanInputs(source(), size=size), ranks=1, is_cpu=True)
    assert (task.answered, task.scored) == (answered, scored)


def test_a_later_stage_takes_the_seconds_of_its_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs are in another file than the conversations, and the prompts of PPO have no answers."""
    monkeypatch.setattr(planner, "measure", lambda *_, **__: RATES)
    config = tiny_config(**{stage: {"steps": None, "epochs": 1.0} for stage in ("sft", "reward", "ppo")})
    sizes = {"sft": DataSize(800, 40.0, 10.0), "reward": DataSize(4000, 70.0, 30.0), "ppo": DataSize(1600, 50.0)}
    expected = 0.0
    for stage, size in sizes.items():
        (tmp_path / stage).mkdir()
        inputs = PlanInputs(source(), size=replace(size, answer=size.answer or 10.0))
        planner.fit_settings(config, stage, tmp_path / stage, inputs)
        expected += read_plan(tmp_path / stage)["stage_seconds"] * (stage != "sft")
    later = {stage: size for stage, size in sizes.items() if stage != "sft"}
    planner.fit_settings(config, "sft", tmp_path, PlanInputs(source(), size=sizes["sft"], later=later))
    assert read_plan(tmp_path)["later_seconds"] == pytest.approx(expected)
    assert read_plan(tmp_path)["later_sizes"]["reward"]["rows"] == 4000


def test_the_plan_divides_the_rows_among_the_stages_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reward stage, SFT has a third of the rows that SFT and PPO share, as in the run."""
    planned: list[dict[str, float]] = []

    def start(_: str, run_dir: Path, *__: Any, **___: Any) -> StageEnd:
        config = yaml.safe_load((run_dir / "plan" / "config.yaml").read_text())
        planned.append(config["data"]["stage_shares"])
        return StageEnd(0)

    monkeypatch.setattr(command, "_start", start)
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n')
    Path("mine.py").write_text("def score(answer, row): return 1.0\n")
    scorer = ["ppo.reward_model=false", "ppo.reward_function=mine.py:score"]
    assert command.main(["model=gpt2", "data.path=pairs.jsonl", "stage=plan", *scorer]) == 0
    assert planned == [{"sft": 0.2, "ppo": 0.4}]
