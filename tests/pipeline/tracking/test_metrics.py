"""The files of metrics and rollouts after an interrupted run, and when they are large."""

import json
import tracemalloc
from pathlib import Path

from pipeline.report.data import read_run
from pipeline.tracking import metrics


def test_a_line_that_a_full_disk_cut_inside_a_character_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    full = b'{"step": 1, "answer": "\xc3\xa9t\xc3\xa9"}\n'
    path.write_bytes(full + b'{"step": 2, "answer": "\xff"}\n[2]\n"x"\n{"step": "2"}\n' + full[:-7])
    metrics.cut(path, 2)
    assert path.read_bytes() == full


def test_lines_of_repeated_steps_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        metrics.append(path, {"step": step, "loss": float("nan")})
    metrics.cut(path, 2)
    assert path.read_text() == '{"step": 1, "loss": null}\n{"step": 2, "loss": null}\n'
    metrics.cut(path, 0)
    assert path.read_text() == ""


def test_large_files_are_cut_in_place_and_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "ppo" / "rollouts.jsonl"
    path.parent.mkdir()
    row = {"prompt": "word " * 2000, "score": 0.5, "kl": 1.0}
    content = "".join(json.dumps({"step": step, **row}) + "\n" for step in range(1, 401))
    path.write_text(content)
    file = path.stat().st_ino
    tracemalloc.start()
    metrics.cut(path, 399)
    rollouts = read_run(tmp_path).stage("ppo").rollouts
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [step for step, *_ in rollouts] == list(range(1, 400))
    assert peak < len(content) / 4 and path.stat().st_ino == file
