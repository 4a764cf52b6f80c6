"""The house stays in order: imports go down only, one version of everything, documents that tell the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from eyas.digest import imports

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "eyas"

# Floors from the ground up; a module may import from its own floor and those below. `plugins` finds the plugin
# folders by name, and sources hand it the default file reader.
FLOORS = [
    {"deadlines", "errors", "lengths", "records", "progress", "tool_calls", "wire"},
    {"plugins", "config", "hub", "recordfile", "sources.files"},
    {
        "admission",
        "capacity",
        "journal",
        "pieces",
        "chat_template",
        "turns",
        "tokenizer",
        "ranked",
        "remote_tokenizer",
        "render",
        "request",
        "tables",
        "verdicts",
        "timing",
        "columns",
        "censoring",
        "unseen",
        "speed",
        "fit",
        "digest",
        "budget",
        "program",
    },
    {
        "sources",
        "engines",
        "reasoning",
        "checks",
        "exporters",
        "server",
        "judge",
        "units",
        "alarms",
        "audit",
        "selection",
    },
    {"asking", "fleet"},
    {
        "fetch",
        "prompts",
        "generate",
        "pilot",
        "pilot_report",
        "validate",
        "stats",
        "train",
        "export",
        "hours",
        "timeline",
        "mix",
        "doctor",
        "projection",
        "whatif",
    },
    {"report"},
    {"summary", "plan", "adopt", "verify", "failures"},
    {"cli", "schema", "terminal"},
]


def floor(module: str) -> int:
    name = module.removeprefix("eyas.")
    for number, rooms in enumerate(FLOORS):
        if name in rooms:
            return number
    room = name.split(".")[0]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_imports_go_down_only(path: Path) -> None:
    if path.parent == PACKAGE and path.name == "__init__.py":
        return
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    above = {name for name in imports(path) if name != "eyas" and floor(name) > floor(module)}
    assert not above, f"{module} imports from above: {sorted(above)}"


def locked() -> dict[str, set[str]]:
    """Versions by name; a package may have one for each range of Python versions."""
    pins: dict[str, set[str]] = {}
    for name, version in re.findall(
        r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    ):
        pins.setdefault(name, set()).add(version)
    return pins


@pytest.mark.parametrize("path", sorted((ROOT / "envs").glob("*.yaml")), ids=lambda path: path.name)
def test_envs_pin_what_the_lock_pins(path: Path) -> None:
    env = yaml.safe_load(path.read_text())
    assert env["channels"][-1] == "nodefaults"
    pins = locked()
    for entry in env["dependencies"]:
        for pin in entry["pip"] if isinstance(entry, dict) else [entry]:
            name, version = re.split("==?", pin.replace("_", "-"))
            if name in pins:
                assert version in pins[name], f"{path.name}: {name}"


def test_envs_hold_what_their_stages_import() -> None:
    """An env that lacks a dependency of its rule fails only on a user's cluster."""
    known = {
        "yaml": "pyyaml",
        "httptools": "httptools",
        "requests": "requests",
        "numpy": "numpy",
        "pandas": "pandas",
    }
    known |= {"pyarrow": "pyarrow", "zstandard": "zstandard", "pluggy": "pluggy", "msgspec": "msgspec"}
    known |= {"jinja2": "jinja2", "gguf": "gguf", "huggingface_hub": "huggingface_hub"}
    known |= {"tokenizers": "tokenizers", "transformers": "transformers", "tiktoken": "tiktoken"}
    known |= {
        "altair": "altair",
        "datasketch": "datasketch",
        "regex": "regex",
        "vl_convert": "vl-convert-python",
    }
    needed = {
        "data": [
            *PACKAGE.glob("*.py"),
            *PACKAGE.glob("sources/*.py"),
            *PACKAGE.glob("checks/*.py"),
            *PACKAGE.glob("report/*.py"),
        ],
        "generate": [
            PACKAGE / f"{name}.py"
            for name in (
                "generate",
                "asking",
                "units",
                "journal",
                "tables",
                "render",
                "chat_template",
                "pieces",
            )
        ]
        + [PACKAGE / f"{name}.py" for name in ("tokenizer", "remote_tokenizer", "ranked", "fetch")]
        + [*PACKAGE.glob("server/*.py"), *PACKAGE.glob("engines/*.py")],
    }
    only_asking = {
        "httptools",
        "requests",
        "gguf",
        "urllib3",
        "huggingface_hub",
        "tokenizers",
        "transformers",
    }
    only_asking |= {"tiktoken"}
    for env, paths in needed.items():
        text = (ROOT / "envs" / f"{env}.yaml").read_text()
        imported = {
            match
            for path in paths
            for match in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        }
        for module in imported & set(known) - (only_asking if env == "data" else set()):
            assert f"- {known[module]}=" in text, f"{env}.yaml lacks {module}"


def test_the_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        used = re.findall(r"(?:^|[`;&|])\s*make ([a-z-]+)\b", (ROOT / page).read_text(), re.MULTILINE)
        assert used and set(used) <= targets, page


@pytest.mark.parametrize(
    "path", [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))], ids=lambda p: p.name
)
def test_rules_hold_no_logic(path: Path) -> None:
    """What a rule needs to compute has a name, in rules/common.smk."""
    assert not re.findall(r"\blambda\b", path.read_text())


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_plugins_are_found_where_only_the_rules_data_packages_are_installed() -> None:
    """Every rule finds all plugins, so a plugin module must not import at its top what only its own work needs."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['httptools', 'requests', 'urllib3', 'gguf', 'xllamacpp', 'snakemake', 'huggingface_hub', 'tokenizers', 'transformers']))"
    code = f"{blocked}; from eyas.plugins import registry; print(len(registry().all()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout or "0") >= 19, done.stderr


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by name, whatever their folder; two of a name break the collection of all."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
