"""The notebook for a free GPU: its cells are Python, and its commands are valid. `python -m tests.newcomer` runs it."""

import json

from pipeline.config.check import validate
from pipeline.config.compose import compose_jobs, parse_command
from tests.newcomer.notebook import to_program
from tests.tiny import ROOT

NOTEBOOK = ROOT / "examples" / "free_gpu.ipynb"


def test_the_cells_compile_and_the_run_is_valid() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert all(cell["cell_type"] in ("markdown", "code") and not cell.get("outputs") for cell in notebook["cells"])
    program = to_program(NOTEBOOK, {})
    compile(program, NOTEBOOK.name, "exec")
    settings = [line for line in program.splitlines() if line.partition(" = ")[0].isupper()]
    values: dict[str, str] = {}
    exec("\n".join(settings), values)  # the assignments of names in capitals are constants
    assert "/" in values["SOURCE"], "pip would install a package of this name from the package index"
    (job,) = compose_jobs(parse_command(values["RUN"].split()))
    config = validate(job.raw)
    assert (config.model.name, config.data.name, config.ppo.lora.rank > 0) == ("qwen2.5-0.5b", "ultrafeedback", True)
