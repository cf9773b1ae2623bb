"""The model card: a README.md whose header the hub reads, with the results, data, settings and licences of a model."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.schema import SourceConfig
from pipeline.config.stages import STAGES, example_unit
from pipeline.data.hub import cached_licence, licence_in
from pipeline.data.sources import configured_sources, is_remote
from pipeline.export.source import TrainedStage
from pipeline.files import summary_metrics

UNKNOWN = "unknown"
LOSS = {"sft": "loss on held-out conversations, in nats per token", "dpo": "preference loss on held-out pairs"}
RESULTS = {
    "eval_accuracy": "accuracy on held-out pairs",
    "eval_score": "score that PPO was trained on, of answers to held-out prompts at temperature {:g}",
    "eval_score_at_0": "score that PPO was trained on, of greedy answers (temperature 0)",
    "gold_score": "judge's score of answers to held-out prompts at temperature {:g}",
    "gold_score_at_0": "judge's score of greedy answers (temperature 0)",
}


def model_card(stage: TrainedStage, *, title: str, licence: str | None = None, adapter_base: str | None = None) -> str:
    """Return the text of README.md.

    licence: an identifier of the hub, for example apache-2.0; default: the licence of the base model
    adapter_base: the model that the adapters belong to, if the card describes the adapters
    """
    base_licence = _model_licence(stage.base)
    licence = licence or base_licence
    header = yaml.safe_dump(_header(stage, licence, adapter_base), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{header}---\n",
        f"# {title}\n",
        _introduction(stage, adapter_base),
        _results(stage),
        _data(stage),
        _settings(stage),
        "## Licences\n\n"
        f"- This model: {licence}\n- Base model: {base_licence}\n- Data: see the table above\n\n"
        "The licences of the base model and of the data may restrict the use of this model.\n",
    ]
    return "\n".join(part for part in parts if part)


def _header(stage: TrainedStage, licence: str, adapter_base: str | None) -> dict[str, Any]:
    """Return the metadata that the hub shows and searches."""
    base = adapter_base or stage.base
    datasets = sorted({source.hub for _, source in _sources(stage) if source.hub is not None and is_remote(source)})
    return {
        "library_name": "peft" if adapter_base else "transformers",
        "pipeline_tag": "text-generation",
        "license": licence,
        **({"base_model": base} if base is not None and _is_on_hub(base) else {}),
        **({"datasets": datasets} if datasets else {}),
        "tags": list(dict.fromkeys(("zerochat", *(each.name for each in stage.history)))),
    }


def _introduction(stage: TrainedStage, adapter_base: str | None) -> str:
    stages = ", ".join(STAGES[each.name].title for each in stage.history)
    base = stage.base or f"{stage.history[0].config.model.name} with random weights"
    if stage.base is not None and not _is_on_hub(stage.base):
        base = Path(stage.base).name  # a published card must not name the folders of this machine
    subject = "The model with these adapters was" if adapter_base else "This model was"
    text = f"{subject} trained with zerochat. Base model: {base}. Stages: {stages}.\n"
    if adapter_base:
        return text + f"\nLoad the adapters on top of `{adapter_base}` with peft.\n"
    return text + "\nThe tokenizer contains the chat template of the training.\n"


def _results(stage: TrainedStage) -> str:
    """Return a table of the figures of the stage, with the figures of the models before it, if they were measured."""
    summary = stage.summary
    models = summary.get("held_out") or {}
    own = summary_metrics(summary)
    columns = {name: figures for name, figures in models.items() if name in ("base", *STAGES) and name != stage.name}
    columns[stage.name] = own
    titles = [_start(stage) if name == "sft" and name != stage.name else name for name in columns]
    loss = {"eval_loss": LOSS[stage.name]} if stage.name in LOSS else {}
    rows = [
        (meaning.format(stage.config.temperatures[0]), *(_figure(figures.get(name)) for figures in columns.values()))
        for name, meaning in (loss | RESULTS).items()
        if _figure(own.get(name))
    ]
    return "## Results\n\n" + _table(("figure", *titles), rows) if rows else ""


def _start(stage: TrainedStage) -> str:
    """Return the name of the policy that DPO or PPO started from, which the summary calls "sft"."""
    actor = Path(stage.config.actor or "sft")
    name = actor.parent.name if actor.name == "model" else actor.name
    return f"earlier {name}" if name == stage.name else name


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _data(stage: TrainedStage) -> str:
    rows = [
        (STAGES[name].title, _source_name(source), source.split if is_remote(source) else "", _data_licence(source))
        for name, source in _sources(stage)
    ]
    return "## Training data\n\n" + _table(("stage", "data", "split", "licence"), rows)


def _settings(stage: TrainedStage) -> str:
    rows = []
    for each in stage.history:
        section = getattr(each.config, each.name)
        trained = f"adapters (LoRA) of rank {each.lora_rank}" if each.lora_rank else "all parameters"
        size = f"{section.batch_size} {example_unit(each.name, section)}"
        rows.append((STAGES[each.name].title, str(each.config.seed), f"{section.lr:g}", size, trained))
    return "## Training\n\n" + _table(("stage", "seed", "learning rate", "batch size", "trained"), rows)


def _sources(stage: TrainedStage) -> Iterator[tuple[str, SourceConfig]]:
    """Yield (stage, source) of all data that the stages of a model read."""
    for each in stage.history:
        for source in configured_sources(each.config.data):
            if STAGES[each.name].reads in source.stages:
                yield each.name, source


def _source_name(source: SourceConfig) -> str:
    if is_remote(source):
        return str(source.hub)
    if source.path is not None:
        return Path(source.path).name
    return "demo (generated by zerochat)" if source.builtin == "demo" else "reasoning-gym (generated)"


def _data_licence(source: SourceConfig) -> str:
    if source.builtin is not None:
        return "mit" if source.builtin == "demo" else "apache-2.0"  # zerochat's own licence, that of reasoning-gym
    return cached_licence(source.hub, "dataset") if source.hub is not None and is_remote(source) else UNKNOWN


def _model_licence(base: str | None) -> str:
    """Return the licence on the card of a base model, in its folder or in the hub's cache."""
    if base is None:  # random weights
        return UNKNOWN
    card = Path(base).expanduser() / "README.md"
    if card.is_file():
        return licence_in(card)
    return cached_licence(base, "model") if _is_on_hub(base) else UNKNOWN


def _is_on_hub(base: str) -> bool:
    """Return whether a base model is a name on the hub, not a folder, which may be gone."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) is not None and not Path(base).exists()


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
