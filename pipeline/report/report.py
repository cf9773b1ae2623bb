"""Write report.html, one self-contained page about a run folder.

The page needs no script and no request. It can be written at any time: stages that have not run are left out, and
running stages show their results so far.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.stages import STAGES
from pipeline.errors import UserError, exit_status
from pipeline.files import write_atomically
from pipeline.installation import REPORT as REPORT_COMMAND
from pipeline.report import comparison, costs
from pipeline.report.data import RunReading, read_run
from pipeline.report.gaming import gaming_section
from pipeline.report.html import Markup, page
from pipeline.report.seeds import write_seed_report
from pipeline.report.stage_curves import DPO_PLOTS, PPO_PLOTS, REWARD_PLOTS, SFT_PLOTS, stage_section
from pipeline.report.verdict import format_temperatures

REPORT = "report.html"
USAGE = """\
Write the report of a run.

{report} runs/x         write runs/x/report.html again, also for an unfinished run
{report} runs/x runs/y  write one page about runs that differ in seed=
"""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` atomically, and return its path. Raise UserError if the folder has no stage."""
    if not any((run_dir / stage).is_dir() for stage in STAGES):
        raise UserError(f"{run_dir} is no run folder: set the folder that contains sft/, reward/, dpo/ or ppo/")
    path = run_dir / REPORT
    write_atomically(path, render_report(read_run(run_dir)))
    return path


def render_report(run: RunReading) -> Markup:
    """Build the report page of `run`."""
    dots = f" at {format_temperatures(run.temperatures[:1])}" if run.temperatures else ""
    sft_section = stage_section(
        run.stage("sft"), "Supervised fine-tuning", "Trained to imitate the answers of the data.", SFT_PLOTS
    )
    reward_section = stage_section(
        run.stage("reward"),
        "Reward model",
        "Trained to score the preferred answer of a pair higher.",
        REWARD_PLOTS,
    )
    dpo_section = stage_section(
        run.stage("dpo"),
        "Direct preference optimization",
        "Trained to make preferred answers more likely than the start model does, and other answers less likely.",
        DPO_PLOTS,
    )
    ppo_section = stage_section(
        run.stage("ppo"),
        "PPO",
        f"Thin lines: single rollouts. Thick lines: centred running mean. Dots: evaluations on held-out prompts{dots}.",
        PPO_PLOTS,
    )
    sections = {
        "changes": ("Changes", comparison.changes_section(run)),
        "gaming": ("Gaming", gaming_section(run)),
        "answers": ("Answers", comparison.answers_section(run)),
        "sft": ("SFT", sft_section),
        "reward": ("Reward model", reward_section),
        "dpo": ("DPO", dpo_section),
        "ppo": ("PPO", ppo_section),
        "speed": ("Speed", costs.speed_section(run)),
        "memory": ("Memory", costs.memory_section(run)),
        "configuration": ("Configuration", costs.configuration_section(run)),
    }
    header = comparison.verdict_header(run, costs.facts(run))
    footer = "Written by zerochat. All figures of this page are in the run folder, as JSON and YAML."
    return page(run.name, header, sections, footer)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a run folder, or one page about several runs, and return the exit status."""
    run_dirs = _parser().parse_args(arguments).run_dirs
    return exit_status(lambda: _write(run_dirs))


def _write(run_dirs: Sequence[Path]) -> int:
    try:
        if len(run_dirs) == 1:
            lines: tuple[object, ...] = (write_report(run_dirs[0]),)
        else:
            path, verdict = write_seed_report(run_dirs)
            lines = verdict.headline, verdict.evidence, path
    except OSError as problem:
        raise UserError(f"the report cannot be written: {problem}") from problem
    print(*lines, sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=REPORT_COMMAND,
        description=USAGE.format(report=REPORT_COMMAND),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dirs", type=Path, metavar="RUN", nargs="+", help="the folder of a run")
    return parser
