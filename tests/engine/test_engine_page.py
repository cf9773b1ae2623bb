"""The code of docs/reference/engine.md runs, and its two training loops give the same weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.parallel import dtensors

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "engine.md"


def test_the_pages_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"engine.md block {number + 1}", "exec"), names)
        if number == 0:
            plain = {name: p.detach().clone() for name, p in names["model"].named_parameters()}
            lines = block.splitlines()
        if number == 1:
            for name, parameter in names["engine"].module.named_parameters():
                torch.testing.assert_close(dtensors.full_tensor(parameter.detach()), plain[name], atol=1e-6, rtol=1e-5)
            new = [line for line in block.splitlines() if line not in lines and line.strip()]
            assert len(new) == 6  # five marked lines, and the line that moves the batch to the device
    assert names["done"].lr > 0
