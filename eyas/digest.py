"""Content digests of the code that decides a stage's output, so that an edit makes results stale and a `git checkout` or `touch` does not.

Snakemake compares scripts by file time and does not follow imports; so each rule carries this digest in its params.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from eyas.config import Stages
from eyas.plugins import BUILT_IN

PACKAGE = Path(__file__).parent

# Modules that carry data or messages but decide nothing in a result, and with them what only they import. A test
# proves that what a stage really imports is its digest plus this list.
TRANSPORT = frozenset(
    {
        "eyas",
        "eyas.errors",
        "eyas.progress",
        "eyas.alarms",
        "eyas.audit",
        "eyas.wire",
        "eyas.fleet",
        "eyas.server.lease",
        "eyas.server.verdict",
    }
)


def _path(module: str) -> Path | None:
    base = PACKAGE.parent.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def imports(path: Path) -> frozenset[str]:
    """Names of the eyas modules that a file imports anywhere in its text, functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "eyas"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "eyas":
            assert node.module is not None
            found.add(node.module)
            # `from eyas.x import y` may name a module y.
            found |= {
                f"{node.module}.{alias.name}" for alias in node.names if _path(f"{node.module}.{alias.name}")
            }
    return frozenset(found)


@cache
def closure(module: str) -> frozenset[str]:
    """The eyas modules that `module` is made of: itself, what it imports, directly or not, and their packages, minus
    TRANSPORT.
    """
    return _closure([module])


def _closure(start: Iterable[str]) -> frozenset[str]:
    seen: set[str] = set()
    todo = list(start)
    while todo:
        module = todo.pop()
        path = _path(module)
        if path is None or module in seen or module in TRANSPORT:
            continue
        seen.add(module)
        todo += [*imports(path), module.rpartition(".")[0]]
    return frozenset(seen)


@cache
def module_digest(module: str) -> str:
    """SHA-256 of a module's bytes; of a package, its data files too."""
    path = _path(module)
    assert path is not None, module
    total = hashlib.sha256(path.read_bytes())
    if path.name == "__init__.py":
        for data in sorted(path.parent.glob("*.j2")):
            total.update(data.name.encode() + data.read_bytes())
    return total.hexdigest()


def code_digest(stages: Stages, stage: str, dataset: str | None = None, exporter: str | None = None) -> str:
    """One digest over (name, bytes) of the stage's modules and of each plugin that it uses; no absolute paths."""
    modules, strangers = parts(stages, stage, dataset, exporter)
    lines = [*(f"{module} {module_digest(module)}" for module in sorted(modules)), *strangers]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def parts(
    stages: Stages, stage: str, dataset: str | None = None, exporter: str | None = None
) -> tuple[set[str], list[str]]:
    """What a digest is made of: the eyas modules, and a line for each plugin of a stranger."""
    modules = set(closure(f"eyas.{stage}"))
    strangers: list[str] = []
    for kind, name in stages.plugins(stage, dataset, exporter):
        found = stages.registry.find(kind, name, stage)
        if found.origin == BUILT_IN:
            modules |= closure(found.cls.__module__)
        else:
            strangers.append(f"{kind} {name} {found.digest}")
            modules |= _closure(imports(Path(found.origin))) if Path(found.origin).is_file() else set()
    return modules, strangers


def code_digests(stages: Stages) -> str:
    """The code digest of every job of a run, by stage and subject, as one JSON line, for the manifest."""
    found: dict[str, dict[str, str]] = {}
    for stage, subject, arguments in stages.jobs():
        found.setdefault(stage, {})[subject] = code_digest(stages, stage, **arguments)
    return json.dumps(found, sort_keys=True)
