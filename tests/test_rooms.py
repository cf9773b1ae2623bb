"""The import rules between packages (docs/design.md), checked in the source text. The project is not imported."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("engine", "pipeline", "step1_sft", "step2_reward", "step2_dpo", "step3_ppo", "benchmarks")
ALLOWED = {
    "engine": {"engine"},
    "pipeline": {"pipeline", "engine"},
    "step1_sft": {"step1_sft", "pipeline", "engine"},
    "step2_reward": {"step2_reward", "pipeline", "engine"},
    "step2_dpo": {"step2_dpo", "pipeline", "engine"},
    "step3_ppo": {"step3_ppo", "pipeline", "engine"},
    "train": {"pipeline", "engine"},
    "chat": {"pipeline", "engine"},
}
NOT_IN_ENGINE = {"hydra", "omegaconf", "wandb", "pydantic", "datasets"}
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "destroy_process_group", "gather", "gather_object",
    "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
}  # fmt: skip
NAMESPACES = {
    "attention", "checkpoint", "deepspeed_json", "distributed", "kernels", "loading", "memory", "oom",
}  # fmt: skip
PURE = ("loss.py", "advantages.py", "sampling.py")


def sources(room: str) -> list[Path]:
    """Return the Python files of a package, or the file of a top-level module."""
    path = ROOT / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


@cache  # many tests read the same files
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Yield (module, line) for every import statement of a file, also inside functions."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write an absolute import, which shows the package"
            yield from ((f"{node.module}.{name.name}", node.lineno) for name in node.names)


def present(room: str) -> bool:
    return (ROOT / room).is_dir() or (ROOT / room).with_suffix(".py").exists()


@pytest.mark.parametrize("room", [room for room in ALLOWED if present(room)])
def test_packages_import_only_lower_packages(room):
    ours = {*ROOMS, "train", "chat", "tests"}
    for file in sources(room):
        for module, line in imports(file):
            top = module.split(".")[0]
            assert top not in ours or top in ALLOWED[room], f"{file}:{line} imports {module}"


def exported(module: str) -> set[str]:
    """Return the names in a module's `__all__`."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{file} has no __all__")


def engine_namespaces() -> dict[str, str]:
    """Return {name: module} for the names that the engine exports and that are modules."""
    names = exported("engine")
    results = {}
    for node in nodes(ROOT / "engine" / "__init__.py"):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = ROOT / Path(*f"{node.module}.{alias.name}".split("."))
                if (alias.asname or alias.name) in names and (path.is_dir() or path.with_suffix(".py").exists()):
                    results[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return results


UPPER_ROOMS = [room for room in ALLOWED if room != "engine" and present(room)]


def test_the_engine_exports_at_most_20_names():
    assert len(exported("engine")) <= 20
    assert set(engine_namespaces()) == NAMESPACES


def test_other_packages_import_only_exported_names():
    names = exported("engine")
    for room in UPPER_ROOMS:
        for file in sources(room):
            for module, line in imports(file):
                top, _, name = module.partition(".")
                allowed = top != "engine" or name.partition(".")[0] in names | {""}
                assert allowed, f"{file}:{line} imports {module}, which is not in engine.__all__"


def test_other_packages_use_only_exported_names_of_namespaces():
    namespaces = {name: exported(module) for name, module in engine_namespaces().items()}
    for room in UPPER_ROOMS:
        for file in sources(room):
            local = set()
            for module, line in imports(file):
                top, name, *inner = [*module.split("."), ""]
                if top == "engine" and name in namespaces:
                    assert inner[0] in namespaces[name] | {""}, f"{file}:{line} imports {module}: not exported"
                    local |= {name} if not inner[0] else set()
            for node in nodes(file):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in local:
                    allowed = namespaces.get(node.value.id, {node.attr})
                    assert node.attr in allowed, f"{file}:{node.lineno}: {ast.unparse(node)} is not exported"


def test_stages_do_not_see_ranks():
    """Stages may print on one rank, and get sums and values of all ranks. The layout of the ranks is the pipeline's."""
    allowed = {"broadcast_object", "is_rank_zero", "sum_over_ranks", "to_device"}
    for file in (file for room in ROOMS[2:6] for file in sources(room)):
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "distributed":
                assert node.attr in allowed, f"{file}:{node.lineno}: {ast.unparse(node)}"


def test_the_engine_imports_no_configuration_and_no_tracking():
    for file in sources("engine"):
        for module, line in imports(file):
            assert module.split(".")[0] not in NOT_IN_ENGINE, f"{file}:{line} imports {module}"


def test_workers_do_not_import_hydra():
    worker = [ROOT / "pipeline" / "launch" / name for name in ("__init__.py", "worker.py")]
    for file in [*worker, *(file for room in ROOMS[2:6] for file in sources(room))]:
        for module, line in imports(file):
            assert not module.startswith(("hydra", "omegaconf", "pipeline.config.compose")), f"{file}:{line}: {module}"


def test_modules_of_the_engine_form_no_import_circle():
    """Imports inside functions and imports for types count too."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
               for file in sources("engine")}  # fmt: skip
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        used = {name for name, _ in imports(file) if name.startswith("engine.")}
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in used}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle


def torch_distributed_calls(file: Path) -> Iterator[tuple[str, int]]:
    """Yield (call, line) for calls of collectives, under any name that this file gives torch.distributed."""
    modules, functions = {"torch.distributed"}, set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            modules |= {name.asname or name.name for name in node.names if name.name == "torch.distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.distributed"):
            for name in node.names:
                if node.module == "torch" and name.name == "distributed":
                    modules.add(name.asname or name.name)
                elif node.module == "torch.distributed" and name.name in COLLECTIVES:
                    functions.add(name.asname or name.name)
    for node in nodes(file):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, leaf = called.rpartition(".")
            if called in functions or (owner in modules and leaf in COLLECTIVES):
                yield called, node.lineno


def test_collectives_are_called_in_two_files():
    parallel = ROOT / "engine" / "parallel"
    allowed = {parallel / "dist.py", parallel / "collectives.py"}
    assert all(list(torch_distributed_calls(file)) for file in allowed), "the search misses calls that exist"
    for room in [*ROOMS, "train", "chat"]:
        for file in sources(room) if present(room) else []:
            if file not in allowed:
                assert not list(torch_distributed_calls(file)), f"{file}: {list(torch_distributed_calls(file))}"


def test_losses_advantages_and_sampling_are_pure():
    for room in ROOMS:
        for file in sources(room):
            if file.name in PURE:
                for module, line in imports(file):
                    allowed = module.split(".")[0] in {"torch", *sys.stdlib_module_names}
                    assert allowed and "distributed" not in module, f"{file}:{line} imports {module}"


def test_no_code_compares_with_a_model_name():
    """No code compares with the name of a model or family. Such names belong into conf/."""
    names = {option.stem for option in (ROOT / "conf" / "model").glob("*.yaml")} - {"tiny"}
    families = {"opt", "gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "mistral", "gemma2", "bloom", "falcon"}
    for room in ROOMS[:6]:
        for file in sources(room):
            for node in nodes(file):
                if isinstance(node, ast.Compare | ast.MatchValue):
                    words = {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
                    assert not words & (names | families), f"{file}:{node.lineno}: {words}"


PUBLIC_PRIVATES = {"_apply", "_buffers", "_modules", "_non_persistent_buffers_set", "_parameters", "_exit"}
"""The tables of `nn.Module` that subclasses have used since torch 1.0, and `os._exit`."""


def defined_names() -> set[str]:
    """Return the names of functions, classes, attributes and variables that the packages define."""
    results = set()
    for file in (file for room in ROOMS[:6] for file in sources(room)):
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                results.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                results.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                results |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return results


def test_only_internals_use_private_names_of_libraries():
    """Only `internals.py` uses a library's private names: they begin with an underscore and no package defines them."""
    own = defined_names() | PUBLIC_PRIVATES
    for file in (file for room in ROOMS[:6] for file in sources(room) if file.name != "internals.py"):
        used = [(name, line) for module, line in imports(file) for name in module.split(".")]
        used += [(node.attr, node.lineno) for node in nodes(file) if isinstance(node, ast.Attribute)]
        for name, line in used:
            is_private = name.startswith("_") and not name.startswith(("__", "_foreach_"))
            assert not is_private or name in own, f"{file}:{line} uses {name}: add a function to internals.py"
