"""Bad values on the command line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.campaign.cases import SFT, TINY, Case

DIGITS = "1" * 5000
VALUES: list[tuple[str, str]] = [
    ("seed=1.5", "seed=1.5: it should be a valid integer"),
    ("seed=-1", "seed=-1: it should be greater"),
    ("seed=99999999999999999999", "seed=9.*it should be less"),
    (f"seed={DIGITS}", "Exceeds the limit"),
    ("seed=[1]", "seed"),
    ("sft.steps=1000000000000", "sft.steps"),
    ("sft.batch_size=1000000000", "sft.batch_size"),
    ("sft.batch_size={a:1}", "sft.batch_size"),
    ("sft.batch_size=1e400", "sft.batch_size"),
    ("sft.lr=nan", "sft.lr=nan: it should be a finite number"),
    ("sft.lr=null", "sft.lr=null"),
    ("sft.lr=", "sft.lr"),
    ("sft.lr=\x1b[31m", "error"),
    ("sft.epochs=0", "sft.epochs=0: it should be greater"),
    ("sft.beta1=1", "sft.beta1=1: it should be less"),
    ("sft.warmup=2", "sft.warmup=2: it should be less"),
    ("sft.lora=8", "sft.lora"),
    ("sft=1", "sft"),
    ("sft.foo.bar=1", "sft.foo"),
    ("=1", "is not KEY=VALUE"),
    ("sft.lr=[", "cannot read sft.lr"),
    ("sft.lr=${nope}", "nope"),
    ("model.architecture=3", "model.architecture=3: it should be a valid dictionary"),
    ("model.architecture={model_type:nope}", "transformers has no such family"),
    ("model.architecture={model_type:lama}", "did you mean llama"),
    ("model.architecture.hiden_size=64", "has no field hiden_size: did you mean hidden_size"),
    ("model.architecture.num_hidden_layers=0", "num_hidden_layers"),
    ("model.architecture.num_hidden_layers=two", "num_hidden_layers"),
    ("model.architecture.hidden_size=33", "hidden.size"),
    ("model.architecture.vocab_size=10", "vocabulary needs at least"),
    ("model.architecture.max_position_embeddings=8", "has 8 positions"),
    ("model.tokenizer=/nope", "/nope: there is no such folder"),
    ("model.chat_template=nope.jinja", "model.chat_template=nope.jinja: there is no such file"),
    ("model.path=/nope", "model.path=/nope"),
    ("data.sources=[]", "data has no source"),
    ("data.sources=[{}]", "data.sources.0 has no data"),
    ("data.sources=[{path:a,weight:0}]", "data.sources.0.weight=0: it should be greater"),
    ("data.stage_shares={sft:0,reward:0,ppo:0}", "at least one above 0"),
    ("data.stage_shares={sft:nan}", "data.stage_shares"),
    ("data.stage_shares={sfx:1}", "data.stage_shares"),
    ("data.demo_examples=3", "data.demo_examples=3: it should be greater"),
    ("engine.deepspeed=nope.json", "engine.deepspeed"),
    ("engine.tensor_parallel=3", "engine.tensor_parallel=3 does not divide"),
    ("ranks=0", "ranks=0: it should be greater"),
    ("rollout.temperature=0", "rollout.temperature=0: it should be greater"),
    ("evaluation.temperatures=[nan]", "evaluation.temperatures"),
    ("tracking.kind=x", "tracking.kind=x: it should be 'wandb', "),
    ("stage=nope", "stage=nope: it should be"),
    ("method=nope", "method=nope: it should be 'ppo', 'dpo' or 'distill'"),
    ("run_dir=/proc/nope", "cannot create the run folder"),
    ("actor=/nope", "actor=/nope"),
]
PPO_VALUES: list[tuple[tuple[str, ...], str]] = [
    (("ppo.guard=maybe",), "ppo.guard=maybe: it should be 'off', 'warn', 'stop' or 'rollback'"),
    (("ppo.reward_weights={model:x}",), "ppo.reward_weights.model=x: it should be a valid number"),
    (("ppo.reward_weights={model:inf}",), "ppo.reward_weights.model"),
    (("ppo.actor_engine={zero:1}",), "ppo.actor_engine"),
    (("reward=/nope",), "reward=/nope"),
]
DEEPSPEED = ["{", "[]", '{"zero_optimization": 3}', '{"fp16": {"enabled": "maybe"}}', '{"optimizer": {"type": 4}}']


def cases() -> list[Case]:
    """Return the cases."""
    found = [Case("config", shown(value), (*TINY, *SFT, value), says) for value, says in VALUES]
    found += [Case("config", " ".join(values), (*TINY, "name=x", *values), says) for values, says in PPO_VALUES]
    deepspeed = (*TINY, *SFT, "engine.deepspeed=ds.json")
    for content in DEEPSPEED:
        name = f"engine.deepspeed of {content}"
        found.append(Case("config", name, deepspeed, "engine.deepspeed", prepare=writes("ds.json", content)))
    return [*found, Case("config", "run_dir is a file", (*TINY, *SFT[:-1], "run_dir=f"), "f", prepare=writes("f", ""))]


def shown(value: str) -> str:
    """Return a value as the report shows it."""
    return value if len(value) < 60 and value.isprintable() else repr(value)[:40]


def writes(name: str, content: str | bytes) -> Callable[[], None]:
    """Return a function that writes a file into the current folder."""
    return partial(_write, name, content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def _write(name: str, content: bytes) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content)
