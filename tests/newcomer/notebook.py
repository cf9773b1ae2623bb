"""Turn a notebook into a Python program, so that its cells can be compiled and executed without Jupyter."""

import json
from collections.abc import Mapping
from pathlib import Path


def to_program(notebook: Path, values: Mapping[str, str]) -> str:
    """Return the code cells as one program.

    `!COMMAND` becomes a shell command with its {variables} filled in, and an error if it fails. `%pip` lines and the
    display of HTML are left out. `values` replace the values of the notebook's variables of these names.

    Raises ValueError if a cell assigns none of `values`, or has another kind of magic line.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    lines, missing = ["import subprocess"], set(values)
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        for line in "".join(cell["source"]).splitlines():
            name = line.partition(" = ")[0]
            if line.startswith("!"):
                lines.append(f"subprocess.run(f{line[1:]!r}, shell=True, check=True)")
            elif line.startswith("%") and not line.startswith("%pip "):
                raise ValueError(f"{notebook}: {line} has no meaning outside Jupyter")
            elif name in values:
                lines.append(f"{name} = {values[name]!r}")
                missing.discard(name)
            elif not line.startswith("%") and "HTML" not in line:
                lines.append(line)
    if missing:
        raise ValueError(f"{notebook}: no cell assigns {', '.join(sorted(missing))}")
    return "\n".join(lines) + "\n"
