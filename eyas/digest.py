"""Content digests of the code that decides a stage's output, so that an edit makes results stale and a `git checkout` or `touch` does not.

Snakemake compares scripts by file time and does not follow imports; so each rule carries this digest in its params.
"""

from __future__ import annotations

import ast
import hashlib
import json
from functools import cache
from pathlib import Path

from eyas.config import Stages

PACKAGE = Path(__file__).parent
STAGES = ("prompts", "generate", "validate", "stats", "train", "mix", "export", "summary")

# Modules that carry data or messages but decide nothing in a result. A test proves that what a stage really imports
# is its digest plus this list.
TRANSPORT = frozenset(
    {
        "eyas",
        "eyas.errors",
        "eyas.plugins",  # finds plugins; the selected ones are digested one by one
        "eyas.progress",
        "eyas.server",
        "eyas.server.lease",
        "eyas.server.supervisor",
    }
)


def _path(module: str) -> Path | None:
    base = PACKAGE.parent.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def imports(module: str) -> frozenset[str]:
    """Names of the eyas modules that `module` imports anywhere in its text, functions included."""
    path = _path(module)
    if path is None:
        return frozenset()
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
def closure(stage: str) -> frozenset[str]:
    """The modules that decide the output of `eyas.<stage>`: what it imports, directly or not, minus TRANSPORT."""
    seen: set[str] = set()
    todo = [f"eyas.{stage}"]
    while todo:
        module = todo.pop()
        if module in seen or module in TRANSPORT:
            continue
        seen.add(module)
        todo += imports(module)
    return frozenset(seen)


@cache
def module_digest(module: str) -> str:
    """SHA-256 of a module's bytes."""
    path = _path(module)
    assert path is not None, module
    return hashlib.sha256(path.read_bytes()).hexdigest()


def code_digest(stages: Stages, stage: str, dataset: str | None = None, exporter: str | None = None) -> str:
    """One digest over (name, bytes) of the stage's modules and of each plugin that it uses; no absolute paths."""
    total = hashlib.sha256()
    for module in sorted(closure(stage)):
        total.update(f"{module} {module_digest(module)}\n".encode())
    for kind, name in stages.plugins(stage, dataset, exporter):
        found = stages.registry.find(kind, name, stage)
        total.update(f"{kind} {name} {found.digest}\n".encode())
    return total.hexdigest()[:16]


def code_digests(stages: Stages) -> str:
    """The digest of every stage as one JSON line, for the manifest."""
    return json.dumps({stage: code_digest(stages, stage) for stage in STAGES}, sort_keys=True)
