"""Write the documentation of the configuration from the schema: `--help` and docs/reference/configuration.md.

`python -m pipeline.config.document` writes the page. A test checks that the page is current.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.messages import as_written, description_of, inner_section
from pipeline.config.overrides import default_options, groups
from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import StageSection
from pipeline.config.stages import STAGES
from pipeline.installation import CHAT, TRAIN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"

MAIN_KEYS = (
    "name",
    "run_dir",
    "stage",
    "method",
    "seed",
    "ranks",
    "actor",
    "reward_path",
    "teacher",
    "model.path",
    "model.hub",
    "model.weights",
    "data.path",
    "engine.dtype",
    "sft.lr",
    "sft.steps",
    "sft.epochs",
    "sft.batch_size",
    "sft.max_length",
    "sft.micro_batch_tokens",
    "reward.lr",
    "reward.steps",
    "dpo.lr",
    "dpo.beta",
    "ppo.lr",
    "ppo.steps",
    "ppo.kl_coef",
    "ppo.batch_size",
    "rollout.temperature",
    "rollout.max_new_tokens",
    "debug",
)

USAGE = """\
zerochat: from a base language model to a chat model, by SFT, a reward model and PPO, or by SFT and DPO.

  python train.py                                  train a tiny chat model in minutes on a CPU
  python train.py model=opt-1.3b stage=all         train a chat model on GPUs
  python train.py model=opt-1.3b data=hh-rlhf stage=reward reward.lr=1e-5
  python train.py model=opt-1.3b method=dpo        train on preferences, without a reward model
  python train.py data.path=mine.jsonl model.path=FOLDER
  python train.py model=opt-1.3b reward_model=opt-350m engine=zero3
  python -m step3_ppo actor=runs/x/sft reward=runs/x/reward ppo.kl_coef=0.1
  torchrun --nnodes 4 --nproc-per-node 8 ... -m zerochat train model=llama-3.1-8b engine=zero3
  python chat.py runs/x                            chat with the model

Run the same command again to resume a stopped run. Results are in runs/<name>/.

Flags: -m (one run for each value: -m seed=1,2,3)  --cfg job (show the configuration, run nothing)  --help"""

INTRODUCTION = """\
# Configuration

This page is generated from `pipeline/config/schema.py` by `python -m pipeline.config.document`. Do not edit it.

Every key can be set on the command line as `KEY=VALUE` (`ppo.kl_coef=0.1`, `sft.lora.rank=16`,
`"data.sources=[{path: mine.csv, columns: {text: prompt}}]"`). A group (`model=opt-1.3b`) selects an option, which is a
file of `conf/<group>/`. Later sources override earlier ones: the defaults below, the options of model and data, the
recipe for the two (`conf/recipe/`), the other options, the command line.
`python train.py --cfg job ...` prints the resulting configuration.

Short forms:

- `reward=FOLDER` sets `reward_path=FOLDER`; `reward=OPTION` selects an option of `conf/reward`.
- `reward_model=opt-350m` selects an option of `conf/model` for the reward model and the critic.
- `model.path=FOLDER` and `model.hub=ID` replace the default option of `model`. `data.path=FILE` and
  `data.sources=[...]` replace that of `data`.
- `actor=RUN/sft` uses the model, data and settings of that run, except `ranks`, `tracking` and `profile`. The command
  line overrides them.
- `model.architecture={model_type: llama, ...}` replaces the architecture of the option;
  `model.architecture.hidden_size=64` changes one of its fields.
- `recipe=NAME` selects a recipe.
- `~sft.lr` removes the values that options and recipe set for a key, so that the default below applies. `~recipe`
  removes the recipe.
"""

SHARED = """\
## Keys of all training stages

Each row lists a key of SFT, reward model, DPO and PPO. A default in parentheses belongs to that stage only.
"""
HEAD = "| key | value | default | meaning |\n| --- | --- | --- | --- |"


def help_text() -> str:
    """Return the text of `--help`: commands, groups with their options, the main keys."""
    lines = [USAGE.replace("python train.py", TRAIN).replace("python chat.py", CHAT), "", "Groups:"]
    chosen = default_options()
    for group, options in groups().items():
        marked = [f"{option} (default)" if option == chosen.get(group) != "default" else option for option in options]
        lines += _wrapped(f"  {group:<9}", ", ".join(marked))
    lines += ["", "Main keys (docs/reference/configuration.md lists all keys):"]
    for key in MAIN_KEYS:
        field = _field(key)
        lines += _wrapped(f"  {key:<24}", f"{description_of(field)} [{_default(field)}]")
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 118, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _field(key: str) -> FieldInfo:
    section: type[BaseModel] = RunConfig
    *parents, leaf = key.split(".")
    for parent in parents:
        section = inner_section(section.model_fields[parent].annotation) or section
    return section.model_fields[leaf]


def page() -> str:
    """Return the text of docs/reference/configuration.md."""
    parts = [INTRODUCTION, "## Groups\n"]
    chosen = default_options()
    for group, options in groups().items():
        default = f" (default `{chosen[group]}`)" if chosen.get(group) else ""
        parts.append(f"- `{group}`{default}: {', '.join(f'`{option}`' for option in options)}")
    parts.append("")
    tables = _table("Run", RunConfig, "")
    first = tables.index(f"## `{next(iter(STAGES))}`")
    parts += [*tables[:first], SHARED, HEAD, *_shared_rows(StageSection, ""), "", *tables[first:]]
    return "\n".join(parts) + "\n"


def _shared_rows(section: type[BaseModel], parent: str) -> Iterator[str]:
    """Yield a row for each key that all training stages have, with each default that differs from the usual one."""
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        if inner is not None:
            yield from _shared_rows(inner, f"{parent}{name}.")
            continue
        usual = _default(field)
        defaults = {stage: _default(_field(f"{stage}.{parent}{name}")) for stage in STAGES}
        others = "".join(f" ({stage}: {default})" for stage, default in defaults.items() if default != usual)
        yield _row(", ".join(f"`{stage}.{parent}{name}`" for stage in STAGES), field, usual + others)


def _table(title: str, section: type[BaseModel], prefix: str) -> list[str]:
    rows, deeper = [], []
    is_stage = issubclass(section, StageSection)
    for name, field in section.model_fields.items():
        if is_stage and name in StageSection.model_fields:
            continue
        key = f"{prefix}{name}"
        inner = inner_section(field.annotation)
        if inner is not None and key != "reward_model":
            number = "N." if get_origin(field.annotation) is list else ""
            deeper.append((key, inner, f"{key}.{number}"))
            if not number:
                continue
        rows.append(_row(f"`{key}`", field, _default(field)))
    more = ["Further keys: [keys of all training stages](#keys-of-all-training-stages).", ""] if is_stage else []
    lines = [f"## {title}", "", *more, HEAD, *rows, ""]
    for key, inner, below in deeper:
        lines += _table(f"`{key}`", inner, below)
    return lines


def _row(key: str, field: FieldInfo, default: str) -> str:
    return f"| {key} | {_kind(field)}{_bounds(field)} | {default} | {description_of(field)} |"


def _kind(field: FieldInfo) -> str:
    return _kind_of(field.annotation).replace("|", "\\|")


def _kind_of(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    words = {int: "whole number", float: "number", str: "text", bool: "true, false", type(None): "null", Any: "any"}
    if annotation in words:
        return words[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys"
    if origin is list:
        return f"list of {_kind_of(arguments[0])}"
    if origin is dict:
        return f"{{{_kind_of(arguments[0])}: {_kind_of(arguments[1])}}}"
    if "Literal" in str(origin):
        return ", ".join(str(value) for value in arguments)
    if getattr(annotation, "__metadata__", None):
        return _kind_of(arguments[0])
    return " or ".join(_kind_of(choice) for choice in arguments)


def _bounds(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    named = [(rule, name) for rule in field.metadata for name in signs if hasattr(rule, name)]
    found = [f"{signs[name]} {getattr(rule, name):g}" for rule, name in named]
    return f" ({', '.join(found)})" if found else ""


def _default(field: FieldInfo) -> str:
    return "from the option" if field.is_required() else as_written(field.get_default())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
