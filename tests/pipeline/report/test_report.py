import errno
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.data.records import Message
from pipeline.errors import UserError
from pipeline.evaluation.samples import Sample
from pipeline.report.comparison import answer_card, ranked
from pipeline.report.data import StageReading, read_run
from pipeline.report.report import main, render_report, write_report
from pipeline.report.stage_curves import stage_section
from tests.pipeline.report.example_runs import (
    CONFIG,
    HOSTILE,
    sample,
    update_lines,
    write_demo_run,
    write_stage,
)

TAGS = """
html head meta title style body main header footer nav section article div p span strong h1 h2 h3 dl dt dd a
table thead tbody tr th td figure figcaption details summary pre svg g line rect circle text polyline
"""
ALLOWED = TAGS.split()
VOID = {"meta", "line", "rect", "circle", "polyline"}


class Checker(HTMLParser):
    """Parse a page: collect its tags, text and links, and check that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in ("src", "style", "srcdoc", "action"), name
            self.links += [value or ""] if name == "href" else []
            self.ids += [value or ""] if name == "id" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += f" {data}"


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert set(checker.links) == {f"#{name}" for name in checker.ids}, "links must lead to sections of this page"
    return checker


def test_a_complete_run(tmp_path: Path) -> None:
    write_demo_run(tmp_path)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert not list(tmp_path.glob("*.tmp"))
    page = path.read_text(encoding="utf-8")
    actual = check(page)
    sections = [name for name in actual.ids if not name.startswith("chart-")]
    assert sections == ["changes", "gaming", "answers", "sft", "reward", "ppo", "speed", "memory", "configuration"]
    for text in ("RLHF helped at temperatures 1 and 0.",
                 "PPO, temperature 0", "No sign of it at", "First ratio", "Explained variance", "Held-out accuracy",
                 "0.90", "The first 8 of 96", "2 more prompts", "Best answers of PPO by gold score",
                 "Worst answers of PPO by gold score", "Reward scores before and after, temperature 1",
                 "Dots: evaluations on held-out prompts at temperature 1.",
                 "2.7 min",
                 "915 MiB", "name: tiny", "sha256:9f"):  # fmt: skip
        assert text in actual.text, text
    assert len(page) < 600_000


def test_the_answers_to_a_prompt_have_a_row_for_each_temperature() -> None:
    cold, warm = (Sample((Message("user", "Hi"),), {"sft": "a", "ppo": "b"}, {}, {}, temperature=t) for t in (0.0, 1.0))
    card = answer_card([warm, cold], {"sft": "SFT", "ppo": "PPO"})
    rows = [re.findall(r"(\w+), temperature (\d)", row) for row in card.split('class="answers"')[1:]]
    assert rows == [[("SFT", "1"), ("PPO", "1")], [("SFT", "0"), ("PPO", "0")]]


def test_the_best_and_the_worst_answers_come_in_order() -> None:
    rows = [Sample((), {"ppo": str(number)}, gold={"ppo": gold}) for number, gold in enumerate((0.5, 1.0, 0.0, 1.0))]
    assert [each.answers["ppo"] for each in ranked(rows, "gold", "ppo")] == ["1", "3", "0", "2"]
    assert ranked(rows, "gold", "dpo") == []


def test_a_report_on_a_full_disk_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_demo_run(tmp_path)
    monkeypatch.setattr("pipeline.files.os.fsync", full)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: the report cannot be written: [Errno 28] No space left on device\n"


def test_a_gamed_run_is_reported(tmp_path: Path) -> None:
    write_demo_run(tmp_path, gamed=True)
    (tmp_path / "ppo" / "config.yaml").write_text(f"{CONFIG}evaluation: {{judge: a/mine.py:grade}}\n")
    actual = check(render_report(read_run(tmp_path)))
    assert "the reward model was gamed" in actual.text
    assert "By mine.py:grade, which is not used for training." in actual.text
    assert "Gold was best at rollout 25" in actual.text


@pytest.mark.parametrize(("step", "biased"), [(60, True), (0, False), (90, False)])
def test_figures_that_selected_the_exported_model_are_called_so(step: int, biased: bool) -> None:
    """A selected step has figures with a bias; the start and the last step have not."""
    stage = StageReading("reward", [{"step": 90.0}], {"steps": 90, "exported_step": step})
    text = stage_section(stage, "Reward model", "Trained.", ())
    assert text is not None
    assert ("Its held-out figures look better than they are" in text) == biased
    assert (f"The exported model is that of step {step}" in text) == (step != 90)


def by_function(run_dir: Path, *, reward_model: bool) -> str:
    """Return the text of the page of a run with a reward function."""
    write_demo_run(run_dir, gamed=True)
    message = f"{CONFIG}ppo:\n  reward_function: mine.py:score\n  reward_model: {str(reward_model).lower()}\n"
    (run_dir / "ppo" / "config.yaml").write_text(message)
    if reward_model:
        rows = [{"step": step, "function_score": 0.1 * step, "eval_function_score": 0.1 * step} for step in (1, 5, 60)]
        with (run_dir / "ppo" / "metrics.jsonl").open("a") as metrics:
            metrics.writelines(json.dumps(row) + "\n" for row in rows)
        update_lines(run_dir / "ppo" / "samples.jsonl", lambda row: row | {"function": {"sft": 0.0, "ppo": 1.0}})
    else:
        shutil.rmtree(run_dir / "reward")
    return check(render_report(read_run(run_dir))).text


def test_a_reward_function_is_not_called_a_model(tmp_path: Path) -> None:
    text = by_function(tmp_path, reward_model=False)
    assert "reward model" not in text.lower()
    for words in ("the reward function was gamed", "Is the reward function being gamed?", "Reward score",
                  "exploits errors of the reward function",
                  "By the reward function that PPO was trained on."):  # fmt: skip
        assert words in text, words
    assert "Reward function's share" not in text


def test_scores_of_model_and_function_are_shown_separately(tmp_path: Path) -> None:
    text = by_function(tmp_path, reward_model=True)
    for words in ("Is the reward being gamed?", "The sum of reward model and reward function", "function +1.00",
                  "Reward function's share of the score",
                  "The reward function's share of the reward score."):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("kept", [(), ("sft", "reward"), ("ppo",)])
def test_stages_may_be_missing(tmp_path: Path, kept: tuple[str, ...]) -> None:
    write_demo_run(tmp_path)
    for name in {"sft", "reward", "ppo"} - set(kept):
        shutil.rmtree(tmp_path / name)
    actual = check(render_report(read_run(tmp_path)))
    assert {name for name in ("sft", "reward", "ppo") if name in actual.ids} == set(kept)


def test_a_running_stage_is_shown_with_its_metrics_so_far(tmp_path: Path) -> None:
    write_demo_run(tmp_path)
    (tmp_path / "ppo" / "summary.json").unlink()
    (tmp_path / "ppo" / "samples.jsonl").unlink()
    actual = check(render_report(read_run(tmp_path)))
    assert "No verdict yet" in actual.text
    assert "Unfinished: the last logged step is 60." in actual.text


def test_text_of_models_and_files_is_escaped(tmp_path: Path) -> None:
    run_dir = tmp_path / "<b>run"
    row = sample(0.1, 0.2, 0.3, text=HOSTILE)
    row["prompt"] = [{"role": HOSTILE, "content": HOSTILE}]
    row["answers"][HOSTILE] = "<img src=x onerror=alert(1)>"
    write_stage(
        run_dir / "ppo",
        [{"step": 1, "score": 1.0}],
        {"steps": 1, "seconds_by_phase": {HOSTILE: 1.0}},
        [row],
        f'model: {{name: "<script>"}}\n# </pre><script>{HOSTILE.encode("ascii", "replace").decode()}',
    )
    write_stage(run_dir / "reward", summary={"eval_accuracy_by_source": {HOSTILE: 0.5}})
    (run_dir / "manifest.json").write_text('{"</details><script>": 1}')
    actual = check(write_report(run_dir).read_text(encoding="utf-8"))
    assert actual.text.count("<script>") >= 5


def test_metrics_that_are_not_finite_do_not_break_the_page(tmp_path: Path) -> None:
    rows = [{"step": 1, "score": None, "kl": 1e38, "eval_score": 1, "gold_score": None}, {"step": 2, "kl": -1e38}]
    write_stage(tmp_path / "ppo", rows, {"steps": 2, "gold_score": None, "final": {"score": None}})
    check(render_report(read_run(tmp_path)))


def test_long_answers_are_truncated_and_many_ranks_summarized(tmp_path: Path) -> None:
    memory = [{"rank": rank, "device_bytes": rank * 2**30, "host_bytes": 2**30} for rank in range(64)]
    write_stage(tmp_path / "ppo", summary={"peak_memory_by_rank": memory}, samples=[sample(0, 0, 0, text="x" * 9000)])
    actual = check(render_report(read_run(tmp_path)))
    assert "(5000 more characters)" in actual.text
    assert "63.00 GiB" in actual.text
    assert "62.00 GiB" not in actual.text


def test_dpo_shows_rewards_of_held_out_pairs_and_which_it_ranks(tmp_path: Path) -> None:
    rows = [
        {"step": step, "chosen_reward": -step, "rejected_reward": -2 * step, "eval_chosen_reward": -3.25 * step}
        | {"loss": -0.5 * step}  # robust DPO has no lower bound
        for step in (1, 2)
    ]
    shares = {"eval_accuracy": 0.71, "eval_accuracy_chosen_longer": 0.9, "eval_accuracy_rejected_longer": 0.4321}
    write_stage(tmp_path / "dpo", rows, {**shares, "eval_pairs": 64, "eval_accuracy_by_source": {"mine": 0.71}})
    actual = check(render_report(read_run(tmp_path)))
    for words in ("held-out", "−6.50", "64 pairs.", "source mine", "0.71", "0.43", "−0.8"):
        assert words in actual.text, words


def test_a_missing_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        write_report(tmp_path / "nothing")
    with pytest.raises(UserError, match="no run folder"):
        write_report(tmp_path)  # for example runs/ instead of runs/NAME
    assert not list(tmp_path.iterdir())


def cells(page: str, title: str) -> list[list[str]]:
    """Return the texts of the table below a title, row by row."""
    table = page[page.index(title) :].partition("</table>")[0]
    return [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]


def test_measured_and_predicted_bytes_are_shown_by_owner(tmp_path: Path) -> None:
    megabytes = {"predicted": {"train": {"parameters": 2**20, "logits": 3 * 2**20}}, "measured": {}}
    megabytes["measured"] = {"train": {"parameters": 2 * 2**20}, "generate": {"cache": 5 * 2**20}}
    memory = [{"rank": 0, "device_bytes": 0, "host_bytes": 2**30}]
    out_of_memory = {"restarts": 2, "micro_batch_tokens": 1024}
    summary = {"stage": "sft", "memory": megabytes, "out_of_memory": out_of_memory, "peak_memory_by_rank": memory}
    write_stage(tmp_path / "sft", [], summary)
    page = render_report(read_run(tmp_path))
    assert cells(page, "Bytes by owner") == [
        ["SFT", "train", "parameters", "1 MiB", "2 MiB"],
        ["SFT", "train", "logits", "3 MiB", ""],
        ["SFT", "generate", "cache", "", "5 MiB"],
    ]
    assert "ran out of memory 2 times" in page and "at most 1,024 tokens" in page


def test_labelled_answers_have_an_accuracy_of_their_own(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 0.5, "label_accuracy": 0.5} for step in (1, 2)]
    write_stage(tmp_path / "dpo", rows, {"stage": "dpo", "steps": 2})
    page = render_report(read_run(tmp_path))
    check(page)
    assert "Accuracy of labels" in page


def test_predicted_and_measured_seconds_are_shown(tmp_path: Path) -> None:
    phases = {"generate": 30.0, "train": 10.0, "evaluate": 99.0}
    write_stage(tmp_path / "ppo", [], {"stage": "ppo", "steps": 10, "seconds_by_phase": phases})
    assert " x<" not in render_report(read_run(tmp_path)), "nothing was planned"
    plan = {"seconds": {"generate": 6.0, "score": 1.0, "train": 1.5, "step": 0.25}}
    (tmp_path / "ppo" / "plan.json").write_text(json.dumps(plan))
    page = render_report(read_run(tmp_path))
    check(page)
    assert cells(page, "Where the time goes") == [
        ["PPO", "evaluate", "1.6 min", "71%", "9.9 s", "", ""],
        ["PPO", "generate", "30 s", "22%", "3 s", "6 s", "0.5 x"],
        ["PPO", "train", "10 s", "7%", "1 s", "1.8 s", "0.57 x"],
    ]
