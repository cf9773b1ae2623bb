"""Read local data files as tables of rows: jsonl, json, csv, tsv (each also compressed), parquet and arrow.

The files of a folder are read in the order of their names. A file is held out if its name, or the name of a folder
that contains it, starts with test, eval, valid, dev or heldout. (`datasets` saves data sets in such folders.) All other
files are training data. Hidden files and files with metadata of a data set are ignored.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from pipeline.data.records import Row
from pipeline.errors import UserError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
PACKED = (".gz", ".zst", ".bz2", ".xz")
SEPARATORS = (",", ";", "\t")
ROWS_PER_BATCH = 2048  # of a parquet file, whose columns are decoded for one batch at a time
NOT_JSON = "a line is not a JSON object"
MORE_CELLS = "a line has more cells than the header (put a cell with commas in quotes)"
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_HELD_OUT = re.compile(r"test|eval(uation)?|valid(ation)?|dev|held[-_ ]?out", re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """Rows with one set of columns. `numbers[i]` is the position of row i in the file, counted from 1.

    columns: the names of the columns that are not null in every row
    broken: (position, reason) of each line that is no row, in the order of the file; these lines count as bad rows
    """

    name: str
    rows: Sequence[Row]
    columns: frozenset[str]
    numbers: Sequence[int]
    unit: str = "row"
    broken: tuple[tuple[str, str], ...] = ()

    def position(self, index: int) -> str:
        """Return the position of a row in its file, for messages: "line 3"."""
        return f"{self.unit} {self.numbers[index]}"


def data_files(path: str, key: str) -> tuple[list[Path], list[Path]]:
    """Return the training files and held-out files of a file or folder. Error messages call the path `key`."""
    found = Path(path)
    if not found.exists():
        raise UserError(missing(path, key))
    if found.is_file():
        return [found], []
    files = sorted(filter(_is_data, files_in(found)))
    if not files:
        raise UserError(
            f"{key}={path}: the folder has no {', '.join(SUFFIXES)} file. Set {key} to a file or another folder."
        )
    held_out = [file for file in files if _is_held_out(file.relative_to(found))]
    train = [file for file in files if file not in held_out]
    return (train, held_out) if train else (held_out, [])


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, without hidden subfolders.

    Links to folders are followed. Each folder is read once, by its own name if it is inside of `folder`: the name of a
    link to held-out rows may be another one.
    """
    seen, waiting = set[str](), [folder]
    while waiting:
        for place, folders, names in os.walk(waiting.pop(0)):
            if (real := os.path.realpath(place)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            waiting += [link for name in folders if (link := Path(place, name)).is_symlink()]
            yield from (Path(place, name) for name in names)


def missing(path: str, key: str) -> str:
    """Return the error message for a path that does not exist. `key` is the configuration key."""
    return (
        f"{key}={path}: there is no such file or folder (relative paths start at {Path.cwd()}). For a data set of the "
        'hub, write "data.sources=[{hub: NAME}]", and for several files "data.sources=[{path: A}, {path: B}]".'
    )


def read_table(path: Path) -> Table:
    """Read one file as a table. Raises UserError if the file is empty, damaged or has an unknown format."""
    suffix = _suffix(path)
    if suffix not in SUFFIXES:
        raise UserError(
            f"{path}: the name has no known suffix (known are {', '.join(SUFFIXES)}). Save a table as CSV in UTF-8, "
            'and documents as JSON Lines, one {"text": "..."} per document.'
        )
    if suffix in (".parquet", ".arrow"):
        return _columnar(path, suffix)
    reader = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv}[suffix]
    return reader(path)


def table_of(
    name: str,
    rows: Sequence[Row],
    numbers: Sequence[int] | None = None,
    unit: str = "row",
    broken: Sequence[tuple[str, str]] = (),
) -> Table:
    """Return a table. Its columns are those with a value other than null in at least one row."""
    if not rows:
        first = f" ({broken[0][1]}: {broken[0][0]})" if broken else ""
        raise UserError(f"{name}: the file has no row{first}. Write one example per row.")
    columns = frozenset(column for row in rows for column, value in row.items() if value is not None)
    numbers = numbers if numbers is not None else range(1, len(rows) + 1)
    return Table(name, rows, columns, numbers, unit, tuple(broken))


def _is_data(file: Path) -> bool:
    """Return whether the name of a file suggests rows."""
    is_cache = file.suffix == ".arrow" and file.name.startswith("cache-")  # a cache file of `datasets`
    is_other = is_cache or file.name.startswith(".") or file.name in _METADATA_FILES
    return _suffix(file) in SUFFIXES and not is_other and file.is_file()


def _is_held_out(file: Path) -> bool:
    """Return whether the path of a file in its folder marks the file as held out."""
    return bool(_HELD_OUT.match(file.name)) or any(map(_HELD_OUT.fullmatch, file.parts[:-1]))


def _suffix(path: Path) -> str:
    packed = path.suffix.lower() in PACKED
    return Path(path.stem if packed else path.name).suffix.lower()


def _unpacked(file: io.BufferedReader) -> IO[bytes]:
    """Return the decompressed content. The first bytes select the format, because a file name may be wrong."""
    first = file.peek(max(map(len, _UNPACK)))
    return next((unpack(file) for begins, unpack in _UNPACK.items() if first.startswith(begins)), file)


def _unpack_zstd(file: IO[bytes]) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


_UNPACK: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\x28\xb5\x2f\xfd": _unpack_zstd,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line feeds. The file is read as a stream, because it may be large."""
    position = 0
    try:
        with open(path, "rb") as file:
            for raw in _unpacked(file):
                yield raw.decode("utf-8" if position else "utf-8-sig")
                position += len(raw)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text at byte {position + error.start}; save the file as UTF-8 (or the archive again)."
        ) from error
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _json_lines(path: Path) -> Table:
    rows, numbers, broken = [], [], []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: also an integer with thousands of digits
            row = None
        if isinstance(row, dict):
            rows.append(row)
            numbers.append(number)
        else:
            broken.append((f"line {number}", NOT_JSON))
    return table_of(str(path), rows, numbers, unit="line", broken=broken)


def _json(path: Path) -> Table:
    """Read a list of objects, an object that contains one such list, or one object per line."""
    text = "".join(_lines(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data") or not text.strip():
            return _json_lines(path)
        raise UserError(f"{path}: the file is not JSON: {error}. Correct the file.") from error
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise UserError(
            f"{path}: the file is not a list of objects. Write [{{...}}, {{...}}], or one object per line (with "
            "pandas: to_json(FILE, orient='records'))."
        )
    return table_of(str(path), value)


def _csv(path: Path) -> Table:
    """Read a table of cells. The separator is the most frequent one in the header: comma, semicolon or tab."""
    csv.field_size_limit(2**31 - 1)  # answers can be longer than the module's 128 KiB
    lines = enumerate(_lines(path))
    before, header = next(((number, line) for number, line in lines if line.strip()), (0, ""))
    separator = max(SEPARATORS, key=header.count)
    reader = csv.DictReader(chain([header], (line for _, line in lines)), delimiter=separator, strict=True)
    rows, numbers = [], []
    broken: list[tuple[str, str]] = []
    end = before + 1  # the last line of the last row
    try:
        for row in reader:
            end = before + reader.line_num
            beyond = row.pop(None, [])  # type: ignore[call-overload]
            if any(cell.strip() for cell in beyond):
                broken.append((f"line {end}", MORE_CELLS))
                continue
            rows.append(row)
            numbers.append(end)
    except csv.Error as error:
        raise UserError(
            f"{path}: the row in line {end + 1} is not CSV: {error}. Put a cell with commas, quotes or line "
            "breaks in quotes, and double the quotes inside it."
        ) from error
    return table_of(str(path), rows, numbers, unit="line", broken=broken)


def _columnar(path: Path, suffix: str) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        if suffix == ".parquet":
            content = pyarrow.parquet.ParquetFile(path, pre_buffer=False)  # the buffer would hold the complete file
            batches = content.iter_batches(batch_size=ROWS_PER_BATCH)
            rows = [row for batch in batches for row in batch.to_pylist()]
        else:
            with pyarrow.memory_map(str(path)) as file:
                is_file = file.read(6) == b"ARROW1"  # the IPC file format; `datasets` writes the streaming format
                file.seek(0)
                rows = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file).read_all().to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as {suffix[1:]}: {error}") from error
    return table_of(str(path), rows)
