"""The sums by which damage is found: the same however the bytes came, and other ones for other bytes."""

import random
import struct
import zlib
from pathlib import Path

import pytest

from engine.checkpoint.sums import RunningSum, Sum, sum_of
from engine.offload.blocks import BLOCK_BYTES


def plainly(content: bytes) -> int:
    """As the module says it, number by number."""
    filled = content + bytes(-len(content) % BLOCK_BYTES)
    blocks = (filled[at : at + BLOCK_BYTES] for at in range(0, len(filled), BLOCK_BYTES))
    sums = (sum(struct.unpack(f"={BLOCK_BYTES // 8}Q", block)) % 2**64 for block in blocks)
    return zlib.crc32(b"".join(struct.pack("=Q", each) for each in sums))


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 17, 8 * 2**20 + 5000])
def test_a_files_sum_is_what_its_bytes_add_up_to(size: int, tmp_path: Path) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    assert sum_of(tmp_path / "file") == Sum(size, plainly(content))


def test_pieces_of_any_size_and_the_file_agree(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(7 * BLOCK_BYTES)
    (tmp_path / "file").write_bytes(content)
    running = RunningSum()
    for start, stop in ((0, 1), (1, 4), (4, 7)):
        running.add(memoryview(content)[start * BLOCK_BYTES : stop * BLOCK_BYTES])
    assert running.value == sum_of(tmp_path / "file")


def test_a_bit_or_two_blocks_in_the_others_place_are_seen(tmp_path: Path) -> None:
    content = bytearray(random.Random(2).randbytes(4 * BLOCK_BYTES))
    file = tmp_path / "file"
    file.write_bytes(content)
    whole = sum_of(file)
    first, second = content[:BLOCK_BYTES], content[BLOCK_BYTES : 2 * BLOCK_BYTES]
    file.write_bytes(second + first + content[2 * BLOCK_BYTES :])
    assert sum_of(file) != whole
    content[9999] ^= 16
    file.write_bytes(content)
    assert sum_of(file) != whole
