"""Plugins of strangers: the tutorial works as it stands, a package brings all kinds, and errors name the remedy."""

from __future__ import annotations

import ensurepip
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline import ROOT, Run, checkout, executed, fake_server

from eyas.config import Stages, load
from eyas.errors import EyasError
from eyas.plugins import Registry

HELLO = ROOT / "examples" / "eyas-plugin-hello"
TUTORIAL = ROOT / "docs" / "plugins.md"


# --- the tutorial ------------------------------------------------------------------------------------------------


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each code block."""
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def merged(under: Any, over: Any) -> Any:
    """Sections key by key, lists one after the other."""
    if isinstance(under, dict) and isinstance(over, dict):
        return under | {key: merged(under[key], over[key]) if key in under else over[key] for key in over}
    return under + over if isinstance(under, list) and isinstance(over, list) else over


@pytest.mark.workflow
def test_the_tutorial_works_as_it_stands(tmp_path: Path) -> None:
    """Every block of the page: Python goes into the file of its first line, YAML into the config, sh is run."""
    run = Run(checkout(tmp_path / "eyas"), {})
    environment = run.environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    written: dict[str, str] = {}
    shown = ""
    with fake_server(run) as url:
        run.config["server"]["url"] = url
        for language, text in blocks(TUTORIAL):
            if language == "python":
                name = text.split("\n", 1)[0].removeprefix("# ")
                written[name] = written.get(name, "") + text
                (run.folder / name).write_text(written[name])
            elif language == "yaml":
                run.config = merged(run.config, yaml.safe_load(text))
                run.save()
            elif language == "sh":
                done = subprocess.run(
                    ["bash", "-e", "-c", text],
                    cwd=run.folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                )
                assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
                shown += done.stdout
    assert "source riddles" in shown and "check because" in shown and "exporter lengths" in shown
    assert "rules shelf" in shown
    results = run.folder / "results"
    assert len((results / "train/exports/lengths/train.csv").read_text().splitlines()) > 1
    assert "says because too often" in (results / "riddles/stats.json").read_text()
    assert (results / "shelf/tables.txt").is_file()
    assert len(written) == 2, "the page makes one plugin file, and a check of it"


# --- a package ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has everything that this one has, and the example package, installed by pip."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (site / "this.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    source = shutil.copytree(HELLO, tmp_path_factory.mktemp("source") / "hello")
    pip = ["-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        (wheel,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
        pip = [str(wheel / "pip")]
    command = [python, *pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", source]
    subprocess.run([*command, "--disable-pip-version-check"], check=True)
    return python


def test_the_packages_own_tests_pass(python: Path) -> None:
    command = [python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", HELLO / "tests"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HELLO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.workflow
def test_a_run_uses_all_that_the_package_brings(python: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {})
    (run.folder / "data/names.jsonl").write_text('{"name": "Ada"}\n{"name": ""}\n{"name": "Grace"}\n')
    run.config["datasets"]["people"] = {
        "source": {"name": "hello"},
        "files": ["data/names.jsonl"],
        "checks": {"excited": {"policy": "reject", "most": 0}},
    }
    run.config["exports"] = {"lengths": {}}
    run.config["mix"]["eval_share"] = 0
    run.config["rules"] = {"hello": {"greeting": "Our tables:"}}

    wanted = ["results/hello/tables.txt", "results/train/exports/lengths/train.csv"]

    def snakemake(*arguments: str) -> subprocess.CompletedProcess[str]:
        run.save()
        command = [str(python), *run.command(*arguments, *wanted)[1:]]
        return subprocess.run(command, cwd=run.folder, env=run.environment(), capture_output=True, text=True)

    with fake_server(run) as url:
        run.config["server"]["url"] = url
        done = snakemake()
        assert done.returncode == 0, done.stderr[-4000:]
    results = run.folder / "results"
    assert (results / "hello/tables.txt").read_text().startswith("Our tables:\n")
    assert "nobody to greet" in (results / "people/prompts.json").read_text()
    assert len((results / "train/exports/lengths/train.csv").read_text().splitlines()) == 3
    assert executed(done.stderr)["hello_tables"] == 1
    run.config["rules"]["hello"]["greeting"] = "Tables:"
    assert executed(snakemake("--dry-run").stdout) == {"hello_tables": 1}, (
        "its section decides its rule alone"
    )
    run.config["rules"]["hello"]["greting"] = "Hi"
    failed = snakemake()
    assert failed.returncode == 1
    line = (run.folder / "config.yaml").read_text().split("\n").index("    greting: Hi") + 1
    assert (
        f"eyas: error: config.yaml:{line}: rules.hello.greting: unknown key; did you mean `greeting`?"
        in failed.stderr
    )


# --- rules -------------------------------------------------------------------------------------------------------

RULES = """
from pathlib import Path
from eyas import hookimpl
from eyas.plugins import Rules

class Mine(Rules):
    '''Mine.'''
    name = {name!r}
    snakefile = Path(__file__).with_name("mine.smk")

@hookimpl
def register_rules(register):
    register(Mine)
"""


def config(folder: Path, name: str = "mine", **sections: Any) -> dict[str, Any]:
    (folder / "mine.py").write_text(RULES.format(name=name))
    return {
        "model": {"id": "org/tiny"},
        "server": {"engine": {"name": "llamacpp", "model_file": "tiny.gguf"}},
        "datasets": {"alpha": {"source": {"name": "glaive"}, "files": ["x"]}},
        "plugins": [str(folder / "mine.py")],
        **sections,
    }


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rules": {"mime": {}}}, r"rules\.mime: no rules plugin named 'mime'; did you mean 'mine'\?"),
        ({"rules": {"mine": {"x": 1}}}, r"rules\.mine\.x: unknown key"),
        ({"name": "alpha", "rules": {"alpha": {}}}, r"rules\.alpha: .*belongs to the dataset.*rename one"),
        ({"name": "export", "rules": {"export": {}}}, r"rules\.export: .*logs/export/ belongs to the run"),
        ({"name": "train", "rules": {"train": {}}}, r"rules\.train: .*belongs to the run.*rename one"),
        ({"name": "my-rules"}, r"plugins: rules plugin 'my-rules' .*rename it"),
    ],
)
def test_a_section_of_rules_that_does_not_fit_is_named(
    tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(EyasError, match=said):
        load(config(tmp_path, **sections))


def test_rules_whose_file_is_missing_are_named(tmp_path: Path) -> None:
    stages = Stages(load(config(tmp_path, rules={"mine": {}})))
    with pytest.raises(EyasError, match=r"rules\.mine: .*mine\.smk does not exist; correct `snakefile`"):
        stages.plugin_rules()
    (tmp_path / "mine.smk").touch()
    (found,) = stages.plugin_rules().values()
    assert found.config == {"options": {}, "datasets": ["alpha"]}
    assert Stages(load(config(tmp_path))).plugin_rules() == {}, "only what the config names is loaded"


def test_a_packages_plugin_counts_by_its_version_and_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an edit of a package that is installed in place makes stale what it decided."""
    monkeypatch.syspath_prepend(tmp_path)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[eyas]\nmine = mine_of_tests\n")

    def digest(text: str, version: str = "1.0") -> str:
        sys.modules.pop("mine_of_tests", None)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mine\nVersion: {version}\n")
        (tmp_path / "mine_of_tests.py").write_text(text)
        importlib.invalidate_caches()
        return Registry().find("rules", "mine", "rules").digest

    text = RULES.format(name="mine")
    assert digest(text) == digest(text)
    assert digest(text).startswith("mine 1.0 ")
    assert len({digest(text), digest(text + "# An edit, and another size.\n"), digest(text, "1.1")}) == 3
