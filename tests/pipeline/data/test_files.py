"""Files of every format give the same rows. Damaged files are refused with the position and a remedy."""

import bz2
import csv
import gzip
import json
import lzma
import random
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from pipeline.data.files import data_files, read_table
from pipeline.errors import UserError
from pipeline.launch.fingerprint import hash_tree

ROWS = [{"prompt": "eins", "completion": 'une\nligne, "ja"'}, {"prompt": "zwei — 二", "completion": "deux"}]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def lines(rows: list) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines(ROWS))
    write(tmp_path / "b.json", json.dumps(ROWS))
    write(tmp_path / "c.json", json.dumps({"version": 1, "data": ROWS}))
    write(tmp_path / "d.json", lines(ROWS))
    with (tmp_path / "e.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(ROWS)
    for name, separator in (("h.csv", ";"), ("i.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator).writerows([["prompt", "completion"], *(row.values() for row in ROWS)])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "f.parquet")
    arrow_table = pyarrow.Table.from_pylist(ROWS)
    for name, new in (("n.arrow", pyarrow.ipc.new_file), ("o.arrow", pyarrow.ipc.new_stream)):
        with new(tmp_path / name, arrow_table.schema) as arrow:
            arrow.write_table(arrow_table)
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    (tmp_path / "j.jsonl.zst").write_bytes(pyarrow.compress(lines(ROWS).encode(), codec="zstd", asbytes=True))
    (tmp_path / "k.jsonl").write_bytes(bz2.compress(lines(ROWS).encode()))  # the content shows the compression
    (tmp_path / "l.json.xz").write_bytes(lzma.compress(lines(ROWS).encode()))
    write(tmp_path / "m.jsonl.gz", "\ufeff" + lines([{**row, "chosen": None} for row in ROWS]).replace("\n", "\r\n"))
    files, held_out = data_files(str(tmp_path), "data.path")
    assert [file.name[0] for file in files] == list("abcdefghijklmno") and not held_out
    for file in files:
        table = read_table(file)
        nulls = {"chosen": None} if file.name.startswith("m") else {}
        assert list(table.rows) == [{**row, **nulls} for row in ROWS], file.name
        assert table.columns == {"prompt", "completion"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_reading_needs_little_more_memory_than_the_rows(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"{number} " + "word " * 2000, "completion": "yes"} for number in range(200)]
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt", newline="") as file:
        if "csv" in name:
            csv.writer(file).writerows([["prompt", "completion"], *(row.values() for row in rows)])
        else:
            file.write(lines(rows))
    size = sum(len(row["prompt"]) for row in rows)
    tracemalloc.start()
    table = read_table(tmp_path / name)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table.rows) == 200 and current > size
    assert peak - current < size / 4


def test_reading_parquet_decodes_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.data.files.ROWS_PER_BATCH", 50)
    rows = [{"prompt": random.Random(number).randbytes(4000).hex()} for number in range(1000)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50, compression=None)
    default = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(default)
    pyarrow.set_memory_pool(pool)
    try:
        assert list(read_table(tmp_path / "a.parquet").rows) == rows
    finally:
        pyarrow.set_memory_pool(default)
    assert pool.max_memory() < table.nbytes / 4


def test_rows_have_their_line_number(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.jsonl", '{"prompt": "a"}\n\n  \n{"prompt": "b"}\n'))
    assert [table.position(0), table.position(1)] == ["line 1", "line 4"]


@pytest.mark.parametrize(
    ("name", "text", "output"),
    [
        ("a.jsonl", "\n \n", "has no row. Write one example per row"),
        ("a.jsonl", "[" * 100_000, r"has no row \(a line is not a JSON object: line 1\)"),
        ("a.jsonl", "[1]\n", r"has no row \(a line is not a JSON object: line 1\)"),
        ("a.jsonl", '{"prompt": %s}' % ("1" * 5000), r"has no row \(a line is not a JSON object: line 1\)"),
        ("a.json", '[{"prompt": %s}]' % ("1" * 5000), r"is not JSON: Exceeds the limit \(4300 digits\)"),
        ("a.json", '[{"prompt": "a"},\n{"prompt": }]', "is not JSON: Expecting value: line 2"),
        ("a.json", '["a", "b"]', "is not a list of objects"),
        ("a.json", '{"train": [{"prompt": "a"}], "test": [{"prompt": "b"}]}', "is not a list of objects"),
        ("a.json", "", "has no row"),
        ("a.csv", "prompt,completion\n", "has no row"),
        ("a.csv", 'prompt,completion\na,"b\nc,"d\n', "the row in line 2 is not CSV.* double the quotes inside it"),
        ("a.csv", 'prompt,completion\na,"b\nc,d\n', "the row in line 2 is not CSV"),
        ("a.csv", 'prompt,completion\na,b,c\na,"b\nc,d\n', "the row in line 3 is not CSV"),
        ("a.csv", '\nprompt,completion\na,b\nc,"d\n', "the row in line 4 is not CSV"),
        ("a.json", '{"prompt": {"0": "a"}, "completion": {"0": "c"}}', r"with pandas: to_json\(FILE, orient='records'"),
        ("a.parquet", "not parquet", "cannot be read as parquet"),
        ("a.arrow", "not arrow", "cannot be read as arrow"),
        ("a.txt", "hello", r'no known suffix .* documents as JSON Lines, one {"text": "..."} per document'),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, name: str, text: str, output: str) -> None:
    with pytest.raises(UserError, match=output) as refused:
        read_table(write(tmp_path / name, text))
    assert name in str(refused.value)


def test_lines_that_are_not_rows_are_reported(tmp_path: Path) -> None:
    text = '{"prompt": "a"}\n{"prompt": oops}\n[1, 2]\n{"prompt": "b"}\n'
    table = read_table(write(tmp_path / "a.jsonl", text))
    assert list(table.rows) == [{"prompt": "a"}, {"prompt": "b"}] and table.position(1) == "line 4"
    reason = "a line is not a JSON object"
    assert table.broken == (("line 2", reason), ("line 3", reason))
    table = read_table(write(tmp_path / "a.csv", "prompt,completion\na,b\na,well, yes\nc,d\n"))
    assert table.position(1) == "line 4"
    assert table.broken == (("line 3", "a line has more cells than the header (put a cell with commas in quotes)"),)


def test_empty_cells_beyond_the_header_are_ignored(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", "prompt,completion\na,b,,\n"))
    assert list(table.rows) == [{"prompt": "a", "completion": "b"}]


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "naïve"}'.encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8 text at byte 14"):
        read_table(tmp_path / "a.jsonl")


def test_a_folder_has_training_and_held_out_files(tmp_path: Path) -> None:
    rows = ("train-0.jsonl", "train-1.jsonl", "latest.jsonl", "test.jsonl", "sub/validation.jsonl")
    for name in (*rows, "readme.md", ".cache/downloads/a.json", "dataset_infos.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        write(tmp_path / name, lines(ROWS))
    train, held_out = data_files(str(tmp_path), "data.path")
    assert [file.name for file in train] == ["latest.jsonl", "train-0.jsonl", "train-1.jsonl"]
    assert [file.name for file in held_out] == ["validation.jsonl", "test.jsonl"]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    for name in ("data/train.jsonl", "elsewhere/more.jsonl"):
        (tmp_path / name).parent.mkdir()
        write(tmp_path / name, lines(ROWS))
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")  # a circle
    before = hash_tree(tmp_path / "data")
    train, _ = data_files(str(tmp_path / "data"), "data.path")
    assert train == [tmp_path / "data" / "linked" / "more.jsonl", tmp_path / "data" / "train.jsonl"]
    write(tmp_path / "elsewhere" / "more.jsonl", lines(ROWS[:1]))
    assert hash_tree(tmp_path / "data") != before


def test_links_within_a_folder_change_no_names(tmp_path: Path) -> None:
    for name in ("train/a.jsonl", "valid/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        write(tmp_path / name, lines(ROWS))
    (tmp_path / ".latest").symlink_to("train")
    (tmp_path / "best").symlink_to("valid")  # before "valid" in the alphabet
    assert data_files(str(tmp_path), "data.path") == ([tmp_path / "train/a.jsonl"], [tmp_path / "valid/b.jsonl"])


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path)
    (tmp_path / "train" / "cache-1.arrow").touch()
    (train,), (held_out,) = data_files(str(tmp_path), "data.path")
    assert (list(read_table(train).rows), list(read_table(held_out).rows)) == (ROWS, ROWS[:1])


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    full = gzip.compress(lines(ROWS).encode())
    rotten = full[:20] + b"\xff\xff\xff" + full[23:]
    for broken, output in ((full[:-12], "cannot be read"), (rotten, r"not UTF-8 text .*\(or the archive again\)")):
        (tmp_path / "a.jsonl.gz").write_bytes(broken)
        with pytest.raises(UserError, match=rf"a\.jsonl\.gz: {output}"):
            read_table(tmp_path / "a.jsonl.gz")


def test_a_missing_path_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = rf"data\.path=.*nowhere.*no such file .*start at {tmp_path}\)\..* hub, write .*hub: NAME.* several files"
    with pytest.raises(UserError, match=output):
        data_files(str(tmp_path / "nowhere"), "data.path")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder has no"):
        data_files(str(tmp_path / "empty"), "data.path")


def test_empty_lines_before_the_header_of_csv_are_skipped(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", "\n\r\nprompt,completion\n\na,b\n"))
    assert [*table.rows] == [{"prompt": "a", "completion": "b"}] and table.position(0) == "line 5"
