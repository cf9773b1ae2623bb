"""Checksums of files do not depend on the division into writes, and change with any byte."""

import random
from pathlib import Path

import pytest

from engine.checkpoint.storage import checksum_of, write_text


@pytest.mark.parametrize("text", ["", "{}", 1000 * "checkpoint "])
def test_a_written_file_has_its_text_and_its_checksum(text: str, tmp_path: Path) -> None:
    actual = write_text(tmp_path / "file", text)
    assert (tmp_path / "file").read_text() == text
    assert actual == checksum_of(tmp_path / "file") and actual["bytes"] == len(text)


def test_the_digest_is_xxh3() -> None:
    """Compare with the digest of an empty input in xxHash's specification (XXH3_128bits, seed 0)."""
    assert checksum_of(Path("/dev/null")) == {"bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}


def test_a_changed_bit_and_exchanged_blocks_change_the_checksum(tmp_path: Path) -> None:
    content = bytearray(random.Random(2).randbytes(4000))
    file = tmp_path / "file"
    file.write_bytes(content)
    original = checksum_of(file)
    file.write_bytes(content[1000:2000] + content[:1000] + content[2000:])
    assert checksum_of(file) != original
    content[999] ^= 16
    file.write_bytes(content)
    assert checksum_of(file) != original
