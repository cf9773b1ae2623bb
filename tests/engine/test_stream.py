"""Tensors one behind another in a file: small ones put together, large ones from where they are, nothing lost."""

import os
from pathlib import Path

import pytest
import torch

from engine.checkpoint import stream
from engine.checkpoint.stream import Stream
from engine.offload.blocks import BLOCK_BYTES, BlockFile, bytes_of

SIZES = [3, 5000, 100_000, 1, 64, 20_000, 0, 70_001, 8192, 4096, 40_000]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "DIRECT_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(stream, "STAGED_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(stream, "REQUEST_BYTES", 8 * BLOCK_BYTES)


def test_every_byte_is_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in SIZES]
    requests: list[tuple[int, int]] = []
    sent = BlockFile.transfer

    def transfer(file: BlockFile, move: object, view: memoryview, offset: int) -> None:
        requests.append((offset, len(view)))
        sent(file, move, view, offset)

    monkeypatch.setattr(BlockFile, "transfer", transfer)
    file = BlockFile(tmp_path / "all.bin", os.O_RDWR | os.O_CREAT, what="all.bin")
    out, starts = Stream(file), []
    for tensor in tensors:
        starts.append(out.begin(tensor.data_ptr(), tensor.nbytes))
        done = 0
        while done < tensor.nbytes:
            done += out.write(bytes_of(tensor)[done:])
    out.close()
    file.close()
    written = (tmp_path / "all.bin").read_bytes()
    for tensor, start in zip(tensors, starts, strict=True):
        assert written[start : start + tensor.nbytes] == tensor.numpy().tobytes()
        assert start % 64 == 0 or tensor.nbytes >= stream.DIRECT_BYTES
        assert (start - tensor.data_ptr()) % BLOCK_BYTES == 0 or tensor.nbytes < stream.DIRECT_BYTES
    ends = [start + tensor.nbytes for tensor, start in zip(tensors, starts, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    # Whole blocks, each written once, none larger than a request.
    assert len(written) % BLOCK_BYTES == 0 and sum(size for _, size in requests) == len(written)
    assert all(offset % BLOCK_BYTES == size % BLOCK_BYTES == 0 for offset, size in requests)
    assert max(size for _, size in requests) == stream.REQUEST_BYTES
