"""Who may import whom, and what no module may do: read from the source, so that no run has to reach it."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxpar"

# Room → the rooms whose modules it may import. A room is a module or a package directly below jaxpar.
BELOW_THE_LOOP = {
    "config",
    "metrics",
    "precision",
    "compiler_flags",
    "backend",
    "data",
    "parallel",
    "optim",
    "requirements",
    "execution_choices",
    "pipeline_parts",
    "pipeline_plan",
    "pipelined",
    "plan",
    "state",
    "step",
    "events",
    "run_directory",
    "checkpoint_store",
    "checkpoint",
    "resume",
}
BELOW_THE_COMMANDS = BELOW_THE_LOOP | {
    "trainer",
    "sample",
    "traffic",
    "memory",
    "models",
    "command_line",
    "exit_status",
    "digest",
    "export",
    "extent",
    "remote_store",
}
ARROWS: dict[str, set[str]] = {
    "config": set(),
    "metrics": set(),
    "precision": set(),
    "multiples": set(),
    "locks": set(),
    "parallel": {"multiples"},
    "compiler_flags": {"config"},
    "backend": {"config", "compiler_flags"},
    "data": {"config", "locks", "multiples"},
    "optim": {"config", "parallel"},
    "models": {"parallel", "multiples"},
    "requirements": {"multiples", "config", "optim", "parallel"},
    "execution_choices": {"backend", "config", "parallel"},
    "pipeline_parts": {"config", "parallel", "precision"},
    "pipeline_plan": {"config", "parallel"},
    "plan": {
        "config",
        "parallel",
        "backend",
        "execution_choices",
        "optim",
        "pipeline_parts",
        "pipeline_plan",
        "requirements",
    },
    "extent": {"parallel"},
    "state": {"config", "extent", "optim", "parallel", "plan", "precision"},
    "pipelined": {"parallel", "plan", "precision"},
    "step": {"config", "parallel", "optim", "pipelined", "plan", "precision", "state"},
    "digest": {"extent", "parallel"},
    "events": {"config"},
    "run_directory": {"locks"},
    "checkpoint_store": {"config", "extent"},
    "remote_store": {"checkpoint_store", "config"},
    "export": {"checkpoint_store"},
    "restore": {"checkpoint_store", "extent", "parallel"},
    "checkpoint": {"checkpoint_store", "digest", "extent", "parallel", "restore", "state"},
    "resume": {"checkpoint", "checkpoint_store", "config", "data", "extent", "optim", "parallel", "plan", "state"},
    "sample": {"plan", "parallel", "pipelined", "step"},
    "traffic": {"plan", "parallel", "step"},
    "memory": {"plan", "parallel", "optim", "state"},
    "trainer": BELOW_THE_LOOP,
    "heartbeat": set(),
    "exit_status": set(),
    "plot_pipeline": {"exit_status", "parallel"},
    "line": set(),
    "hub": {"exit_status", "heartbeat", "line"},
    "member": {"exit_status", "line"},
    "processes": {"config", "backend", "hub", "line", "member", "parallel"},
    "command_line": {"config", "backend", "exit_status", "member", "parallel", "processes"},
    "launched": {"exit_status", "train"},
    "launch": {"config", "command_line", "compiler_flags", "events", "exit_status", "run_directory"},
    "train": BELOW_THE_COMMANDS,
    "verify": BELOW_THE_COMMANDS,
    "inspect": BELOW_THE_COMMANDS,
    "checkpoints": BELOW_THE_COMMANDS,
}
# What needs no JAX of jaxpar.parallel.pipeline: schedules can be built, checked and drawn anywhere.
PURE_PIPELINE = {
    "schedule",
    "placing",
    "orders",
    "catalogue",
    "routing",
    "replay",
    "validate",
    "tick_loops",
    "makespan",
    "closed_forms",
    "choice",
    "table_file",
    "picture",
    "drawing",
}
# A model names its dims and calls these; mesh and layouts are not its business.
OPEN_TO_MODELS = {
    "constrain",
    "contract",
    "layers",
    "loss",
    "auxiliary",
    "rules",
    "attention",
    "embedding",
    "experts",
    "sequence_order",
}


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is a dotted module, or a name in one; `lazy` if a function's call imports it."""

    target: str
    line: int
    lazy: bool


class _Imports(ast.NodeVisitor):
    """Collects imports, also those inside functions, but not those that only a type checker follows."""

    def __init__(self) -> None:
        self.found: list[Import] = []
        self._depth = 0

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(alias.name, node.lineno, self._depth > 0) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"line {node.lineno}: relative import"
        self.found += [Import(f"{node.module}.{alias.name}", node.lineno, self._depth > 0) for alias in node.names]

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)
            return
        for child in node.orelse:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._body_of_a_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._body_of_a_function(node)

    def _body_of_a_function(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1


def imports(source: str) -> list[Import]:
    visitor = _Imports()
    visitor.visit(ast.parse(source))
    return visitor.found


def _module(path: Path) -> str:
    parts = ("jaxpar", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in SOURCES.items()}
OUR_IMPORTS = [
    (module, found)
    for module, path in SOURCES.items()
    for found in imports(path.read_text(encoding="utf-8"))
    if found.target.split(".")[0] == "jaxpar"
]


def _room(dotted: str) -> str:
    return dotted.split(".")[1] if "." in dotted else ""


def _outside(module: str) -> Iterator[Import]:
    """The imports of a module that are not jaxpar's."""
    return (
        found for found in imports(SOURCES[module].read_text(encoding="utf-8")) if not found.target.startswith("jaxpar")
    )


def test_the_reader_of_imports_sees_what_it_must() -> None:
    source = """
from typing import TYPE_CHECKING
import jaxpar.plan as plan
if TYPE_CHECKING:
    from jaxpar import trainer
else:
    from jaxpar import step
class A:
    def f(self):
        from jaxpar.data import sources, cache
"""
    assert [(found.target, found.lazy) for found in imports(source)] == [
        ("typing.TYPE_CHECKING", False),
        ("jaxpar.plan", False),
        ("jaxpar.step", False),
        ("jaxpar.data.sources", True),
        ("jaxpar.data.cache", True),
    ]
    with pytest.raises(AssertionError, match="line 1: relative import"):
        imports("from .plan import Plan")


def test_every_module_belongs_to_a_room() -> None:
    assert {_room(module) for module in SOURCES} - {""} <= ARROWS.keys()


def test_the_arrows_form_no_circle() -> None:
    list(TopologicalSorter(ARROWS).static_order())


def test_imports_follow_the_arrows() -> None:
    against = [
        f"{module}, line {found.line}: {found.target}"
        for module, found in OUR_IMPORTS
        if _room(found.target) not in ARROWS.get(_room(module), set()) | {_room(module)}
    ]
    assert not against


def test_models_import_only_what_is_open_to_them() -> None:
    against = [
        f"{module}, line {found.line}: {found.target}"
        for module, found in OUR_IMPORTS
        if _room(module) == "models"
        and _room(found.target) == "parallel"
        and found.target.split(".")[2] not in OPEN_TO_MODELS
    ]
    assert not against


def test_modules_import_each_other_in_no_circle() -> None:
    """Lazy imports do not count: when a function's call runs one, both modules are there."""
    graph: dict[str, set[str]] = {module: set() for module in SOURCES}
    for module, found in OUR_IMPORTS:
        target = found.target if found.target in SOURCES else found.target.rpartition(".")[0]
        assert target in SOURCES, f"{module}, line {found.line}: {found.target} is no module of ours"
        if not found.lazy:
            graph[module].add(target)
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("room", ["config", "data"])
def test_reading_configuration_and_data_needs_no_jax(room: str) -> None:
    against = [
        f"{module}, line {found.line}: {found.target}"
        for module in SOURCES
        if _room(module) == room
        for found in _outside(module)
        if found.target.split(".")[0] in ("jax", "flax", "optax", "orbax")
    ]
    assert not against


def test_schedules_of_pipelines_need_no_jax() -> None:
    pure = {f"jaxpar.parallel.pipeline.{name}" for name in PURE_PIPELINE}
    assert pure <= SOURCES.keys()
    allowed = {*pure, "jaxpar.multiples"}
    against = [
        f"{module}, line {found.line}: {found.target}"
        for module in sorted(pure)
        for found in imports(SOURCES[module].read_text(encoding="utf-8"))
        if found.target.split(".")[0] in ("jax", "flax", "optax", "orbax")
        or (found.target.startswith("jaxpar.") and not {found.target, found.target.rpartition(".")[0]} & allowed)
    ]
    assert not against


def _names(tree: ast.AST) -> set[str]:
    """Every identifier that the code uses: names, attributes, imported names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
    return found


def test_models_know_no_mesh_and_no_layouts() -> None:
    forbidden = {
        "Mesh",
        "PartitionSpec",
        "NamedSharding",
        "with_sharding_constraint",
        "shard_map",
        "make_mesh",
        "set_mesh",
    }
    against = {module: _names(tree) & forbidden for module, tree in TREES.items() if _room(module) == "models"}
    assert against
    assert not any(against.values()), against


def test_only_the_backend_reads_or_sets_environment_variables() -> None:
    forbidden = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    users = {module for module, tree in TREES.items() if _names(tree) & forbidden}
    assert users == {"jaxpar.backend"}


def test_no_file_is_a_drawer_for_everything() -> None:
    names = {"util", "utils", "common", "misc", "helper", "helpers"}
    assert not [module for module in SOURCES if names & set(module.split("."))]


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    against = [
        f"{module}, line {number}: {line.strip()}"
        for module, path in SOURCES.items()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if later.search(line)
    ]
    assert not against


_IMPORT_ALL = """
import importlib, logging, os, pkgutil, signal, warnings
import jax, flax.nnx, grain, optax, orbax.checkpoint, pydantic, rich, tokenizers
from orbax.checkpoint import v1
import jaxpar

def state():
    root = logging.getLogger()
    return {
        "os.environ": dict(os.environ),
        "jax.config": dict(jax.config.values),
        "logging": (root.level, list(root.handlers)),
        "warnings": list(warnings.filters),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "directory": (os.getcwd(), sorted(os.listdir())),
    }

before = state()
modules = [module.name for module in pkgutil.walk_packages(jaxpar.__path__, "jaxpar.")]
for module in modules:
    importlib.import_module(module)
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # raises once JAX has started a backend
assert len(jax.devices()) == 3
print(*modules)
"""


def test_importing_changes_nothing_and_starts_no_backend(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", _IMPORT_ALL]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == SOURCES.keys() - {"jaxpar"}
