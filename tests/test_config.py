"""A wrong config is told in one line: file, line, key, what is wrong, what to do; a right one means what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from eyas import schema
from eyas.config import Config, ModelConfig, SamplingConfig, Stages, canonical, load, locate
from eyas.errors import EyasError
from eyas.plugins import registry

BASE = """\
model:
  id: m
  context: 8192
  reasoning: {name: tags, open: "<think>", close: "</think>"}
server:
  engine:
    name: llamacpp
    model_file: x.gguf
defaults:
  rows: 8
  sampling:
    temperature: 0.6
  checks:
    degenerate: {policy: mark, max_period: 7}
datasets:
  alpha:
    source: {name: glaive}
    files: [alpha.json]
  beta.v2:
    source:
      name: sharegpt
    files: [beta.json]
    rows: 3
    sampling:
      top_p: 0.9
"""

Write = Callable[..., Config]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Loads `text` from run.yaml in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, **options: Any) -> Config:
        Path("run.yaml").write_text(text)
        return load(yaml.safe_load(text), [Path("run.yaml")], **options)

    return write


def replaced(old: str, new: str) -> str:
    assert BASE.count(old) == 1, old
    return BASE.replace(old, new)


def test_the_defaults_leave_room_for_a_prompt() -> None:
    assert SamplingConfig().max_new_tokens < ModelConfig(id="m").context


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("results", r"results lies in results/, and would be deleted with it, .*; name a folder outside, "),
        ("results/journal", r"results/journal lies in results/, "),
        ("logs/../results/a", r"logs/\.\./results/a lies in results/, "),
        ("linked", r"linked lies in results/, "),
        (".", r"results/ lies in \., where .*; name a folder of its own, such as `journal`"),
        ("..", r"results/ lies in \.\., "),
        ("''", r"results/ lies in \., "),
    ],
)
def test_deleting_results_cannot_delete_the_journal(loaded: Write, folder: str, told: str) -> None:
    Path("linked").symlink_to("results/there")
    with pytest.raises(EyasError, match=rf"^run\.yaml:1: journal: {told}"):
        loaded(f"journal: {folder}\n{BASE}")


@pytest.mark.parametrize("folder", ["results.journal", "data/results/journal", "../results/journal"])
def test_a_journal_beside_the_results_is_none_of_them(loaded: Write, folder: str) -> None:
    assert loaded(f"journal: {folder}\n{BASE}").journal == folder


@pytest.mark.parametrize("limit", [8192, 9000])
def test_an_answer_that_fills_the_context_is_refused_before_anything_runs(loaded: Write, limit: int) -> None:
    """Else every prompt is refused one by one, and the run ends well with nothing to train on."""
    text = replaced("      top_p: 0.9", f"      max_new_tokens: {limit}")
    with pytest.raises(EyasError) as caught:
        loaded(text)
    assert str(caught.value) == (
        f"run.yaml:25: datasets.beta.v2.sampling.max_new_tokens: {limit:,} tokens leave no room for a prompt in "
        f"model.context of 8,192; lower it, or raise model.context"
    )


# --- errors -------------------------------------------------------------------------------------------------------

EVALUATION = """evaluation_sets:
  gsm8k: {source: {name: chat}, files: [x.jsonl]}
"""
WRONG: dict[str, tuple[str, str]] = {
    # what: (the config, the line)
    "a misspelt key in a dataset": (
        replaced("    rows: 3", "    rowz: 3"),
        "run.yaml:23: datasets.beta.v2.rowz: unknown key; did you mean `rows`?",
    ),
    "a misspelt key in a section of a dataset": (
        replaced("top_p", "top_pp"),
        "run.yaml:25: datasets.beta.v2.sampling.top_pp: unknown key; did you mean `top_p`?",
    ),
    "a misspelt key under defaults": (
        replaced("  rows: 8", "  rowz: 8"),
        "run.yaml:10: defaults.rowz: unknown key; did you mean `rows`?",
    ),
    "a misspelt key in a section under defaults": (
        replaced("temperature", "temprature"),
        "run.yaml:12: defaults.sampling.temprature: unknown key; did you mean `temperature`?",
    ),
    "a misspelt option of a check under defaults": (
        replaced("max_period", "maxperiod"),
        "run.yaml:14: defaults.checks.degenerate.maxperiod: unknown key; did you mean `max_period`?",
    ),
    "a misspelt key in a section that may be left out": (
        replaced("    rows: 3", "    rows: 3\n    near_duplicates: {threshhold: 0.9}"),
        "run.yaml:24: datasets.beta.v2.near_duplicates.threshhold: unknown key; did you mean `threshold`?",
    ),
    "a misspelt key in the audit": (
        BASE + "audit: {promts: 8}\n",
        "run.yaml:26: audit.promts: unknown key; did you mean `prompts`?",
    ),
    "a misspelt key in a lane": (
        replaced("    model_file: x.gguf", "    model_file: x.gguf\n  lanes: {long: {concurency: 2}}"),
        "run.yaml:9: server.lanes.concurency: unknown key; did you mean `concurrency`?",
    ),
    "a misspelt key in an evaluation set": (
        BASE + EVALUATION.replace("files", "fils"),
        "run.yaml:26: evaluation_sets.fils: unknown key; did you mean `files`?",
    ),
    "a number without end": (
        replaced("temperature: 0.6", "temperature: .inf"),
        "run.yaml:12: defaults.sampling.temperature: inf is no number that can be used; write a finite one",
    ),
    "a script that Unicode has not": (
        replaced("    rows: 3", "    rows: 3\n    filter: {scripts: [Latin, Klingon]}"),
        "run.yaml:24: datasets.beta.v2.filter.scripts: Unicode has no script 'Klingon'; names are as in Latin, Cyrillic, Han",
    ),
    "a filter that nothing passes": (
        replaced("    rows: 3", "    rows: 3\n    filter:\n      min_characters: 9\n      max_characters: 8"),
        "run.yaml:25: datasets.beta.v2.filter.min_characters: 9 is more than max_characters, so nothing fits; lower it",
    ),
    "an evaluation set that is not there": (
        replaced("    rows: 3", "    rows: 3\n    decontaminate: {against: [gsm9k]}") + EVALUATION,
        "run.yaml:24: datasets.beta.v2.decontaminate.against: no set 'gsm9k' in evaluation_sets; did you mean `gsm8k`?",
    ),
    "an evaluation set of no known source": (
        BASE + EVALUATION.replace("chat", "chatt"),
        "run.yaml:27: evaluation_sets.gsm8k.source: no source plugin named 'chatt'; did you mean 'chat'?",
    ),
    "a misspelt key in model": (
        replaced("context", "contxt"),
        "run.yaml:3: model.contxt: unknown key; did you mean `context`?",
    ),
    "a misspelt section": (
        BASE + "expots: {}\n",
        "run.yaml:26: expots: unknown key; did you mean `exports`?",
    ),
    "a misspelt option of a plugin": (
        replaced("model_file: x.gguf", "model_file: x.gguf\n    slotz: 2"),
        "run.yaml:9: server.engine.slotz: unknown key; did you mean `slots`?",
    ),
    "an option that nothing resembles": (
        BASE + "exports: {tokens: {zzz: 1}}\n",
        "run.yaml:26: exports.tokens.zzz: unknown key; known here: supervise_end",
    ),
    "a misspelt policy": (
        replaced("policy: mark", "policy: rejct"),
        "run.yaml:14: defaults.checks.degenerate.policy: 'rejct' is not a policy; use reject, mark (which keeps and counts) or off",
    ),
    "a misspelt key for the policy": (
        replaced("policy: mark", "polcy: mark"),
        "run.yaml:14: defaults.checks.degenerate.polcy: unknown key; did you mean `policy`?",
    ),
    "an unknown source": (
        replaced("name: glaive", "name: glave"),
        "run.yaml:17: datasets.alpha.source: no source plugin named 'glave'; did you mean 'glaive'?",
    ),
    "an unknown source of a dataset with a dot in its name": (
        replaced("name: sharegpt", "name: share_gpt"),
        "run.yaml:20: datasets.beta.v2.source: no source plugin named 'share_gpt'; did you mean 'sharegpt'?",
    ),
    "an unknown engine": (
        replaced("name: llamacpp", "name: zzz"),
        "run.yaml:6: server.engine: no engine plugin named 'zzz'; known: llamacpp",
    ),
    "an unknown reasoning": (
        replaced("name: tags", "name: tag"),
        "run.yaml:4: model.reasoning: no reasoning plugin named 'tag'; did you mean 'tags'?",
    ),
    "an unknown check": (
        replaced("degenerate:", "degenrate:"),
        "run.yaml:14: defaults.checks.degenrate: no check plugin named 'degenrate'; did you mean 'degenerate'?",
    ),
    "an unknown exporter": (
        BASE + "exports:\n  token: {}\n",
        "run.yaml:27: exports.token: no exporter plugin named 'token'; did you mean 'tokens'?",
    ),
    "a plugin section without a name": (
        replaced("{name: glaive}", "{nam: glaive}"),
        "run.yaml:17: datasets.alpha.source: needs a `name`, the source plugin to use",
    ),
    "a word for a number": (
        replaced("rows: 3", "rows: many"),
        "run.yaml:23: datasets.beta.v2.rows: expected `int | null`, got `str`; docs/config.md lists",
    ),
    "a number out of its range": (
        replaced("top_p: 0.9", "top_p: 1.9"),
        "run.yaml:25: datasets.beta.v2.sampling.top_p: expected `float` <= 1.0; docs/config.md lists",
    ),
    "a wrong number under defaults": (
        replaced("temperature: 0.6", "temperature: -1"),
        "run.yaml:12: defaults.sampling.temperature: expected `float` >= 0.0; docs/config.md lists",
    ),
    "a wrong type of a plugin's option": (
        replaced("model_file: x.gguf", "model_file: 3"),
        "run.yaml:8: server.engine.model_file: expected `str`, got `int`; docs/config.md lists",
    ),
    "a word for a section": (
        replaced("{name: glaive}", "glaive"),
        "run.yaml:17: datasets.alpha.source: expected `object`, got `str`; docs/config.md lists",
    ),
    "a list for a section": (
        "datasets: []\n",
        "run.yaml:1: datasets: expected `object`, got `array`; docs/config.md lists",
    ),
    "an empty dataset": (
        BASE + "  gamma:\n",
        "run.yaml:26: datasets.gamma: expected `object`, got `null`; docs/config.md lists",
    ),
    "a choice that there is not": (
        replaced("context: 8192", "tools: sytem"),
        "run.yaml:3: model.tools: invalid enum value 'sytem'; use template or system",
    ),
    "a choice of a dataset, in the defaults": (
        replaced("temperature: 0.6", "temperature: 0.6\n  turns: some"),
        "run.yaml:13: defaults.turns: invalid enum value 'some'; use first or all",
    ),
    "a choice of a plugin": (
        replaced('{name: tags, open: "<think>", close: "</think>"}', "{name: gpt_oss, effort: most}"),
        "run.yaml:4: model.reasoning.effort: invalid enum value 'most'; use low, medium or high",
    ),
    "a choice under names": (
        replaced("{name: glaive}", "{name: chat, roles: {bot: asistant}}"),
        "run.yaml:17: datasets.alpha.source.roles: invalid enum value 'asistant'; use system, user, assistant or tool",
    ),
    "a number for a choice": (
        replaced("context: 8192", "tools: 3"),
        "run.yaml:3: model.tools: expected `str`, got `int`; use template or system",
    ),
    "a file instead of a list of files": (
        replaced("[alpha.json]", "alpha.json"),
        "run.yaml:18: datasets.alpha.files: expected `array`, got `str`; docs/config.md lists",
    ),
    "no files": (
        replaced("[alpha.json]", "[]"),
        "run.yaml:18: datasets.alpha.files: expected `array` of length >= 1; docs/config.md lists",
    ),
    "a missing key of a dataset": (
        replaced("    files: [alpha.json]\n", ""),
        "run.yaml:16: datasets.alpha: the key `files` is missing; add it (docs/config.md",
    ),
    "a missing key of a plugin": (
        replaced("    model_file: x.gguf\n", ""),
        "run.yaml:6: server.engine: the key `model_file` is missing; add it (docs/config.md",
    ),
    "a missing key of the model": (
        replaced("  id: m\n", ""),
        "run.yaml:1: model: the key `id` is missing; add it (docs/config.md",
    ),
    "a missing section": (
        replaced("server:\n  engine:\n    name: llamacpp\n    model_file: x.gguf\n", ""),
        "run.yaml: the key `server` is missing; add it (docs/config.md",
    ),
    "a reserved name": (
        replaced("  alpha:", "  summary:"),
        "run.yaml:16: datasets.summary: the name is reserved for results/summary/; choose another",
    ),
    "a name that is no name of a folder": (
        replaced("  alpha:", "  ../alpha:"),
        "run.yaml:15: datasets: expected `str` matching regex",
    ),
    "a number for a name": (
        replaced("  alpha:", "  7:"),
        "run.yaml:15: datasets: expected `str`, got `int`; names here are text of letters",
    ),
    "a weight of no dataset": (
        BASE + "mix:\n  weights: {alpha: 1, beta.v3: 2}\n",
        "run.yaml:27: mix.weights.beta.v3: no dataset of that name; did you mean `beta.v2`?",
    ),
    "a weight of nothing": (
        BASE + "mix:\n  weights: {alpha: 0}\n",
        "run.yaml:27: mix.weights: expected `float` > 0.0; docs/config.md lists",
    ),
    "weights of no dataset at all": (
        BASE + "mix:\n  weights: {}\n",
        "run.yaml:27: mix.weights: expected `object` of length >= 1; docs/config.md lists",
    ),
    "a regular expression for an engine that takes none": (
        replaced("top_p: 0.9", 'regex: "x+"'),
        "run.yaml:25: datasets.beta.v2.sampling.regex: llama.cpp takes no regular expressions; write it",
    ),
    "a grammar and a regular expression": (
        replaced("top_p: 0.9", 'regex: "x+"\n      grammar: root ::= x'),
        "run.yaml:25: datasets.beta.v2.sampling.regex: an answer cannot be held to a grammar and a regular expression at once; remove",
    ),
    "an engine without the tokenizer it needs": (
        replaced("name: llamacpp\n    model_file: x.gguf", "name: sglang"),
        "run.yaml:1: model.tokenizer: sglang is asked in token ids, so it needs the model's tokenizer; name",
    ),
    "a plugin file that is not there": (
        BASE + "plugins: [nowhere.py]\n",
        "run.yaml:26: plugins: nowhere.py does not exist; correct the path",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_one_line_names_file_line_key_and_remedy(loaded: Write, what: str) -> None:
    text, message = WRONG[what]
    with pytest.raises(EyasError) as error:
        loaded(text)
    assert str(error.value).startswith(message)
    assert re.fullmatch(r"[^\n]+: [^\n]+; [^\n]+|[^\n]+needs a `name`[^\n]+", str(error.value))


HOOK = "from eyas import hookimpl\nfrom eyas.plugins import Check, Exporter\n"
BROKEN = {
    "import nowhere_at_all": "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'; correct",
    "def (": "cannot be loaded: SyntaxError: ",
    f"{HOOK}@hookimpl\ndef register_checks(register):\n    1 / 0": "register_checks fails: ZeroDivisionError: ",
    f"{HOOK}@hookimpl\ndef register_checks(register):\n    register(3)": "register_checks fails: TypeError: ",
    f"{HOOK}@hookimpl\ndef register_sources(register):\n    register(Check)": "registered as source but is no Source;",
    f"{HOOK}class Mine(Exporter): ...\n@hookimpl\ndef register_exporters(register):\n    register(Mine)": (
        "plugin Mine of mine.py has no `name`; give it one"
    ),
    f"{HOOK}class Mine(Exporter):\n    name = 'tokens'\n@hookimpl\ndef register_exporters(register):\n    register(Mine)": (
        "exporter plugin 'tokens' of mine.py is already taken by built-in; rename it"
    ),
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_plugin_is_told_with_the_line_that_asks_for_it(loaded: Write, code: str) -> None:
    Path("mine.py").write_text(code)
    with pytest.raises(EyasError, match=r"^run\.yaml:26: plugins: .*mine\.py") as error:
        loaded(BASE + "plugins: [mine.py]\n")
    assert BROKEN[code] in str(error.value) and "; " in str(error.value)


def test_a_missing_source_file_is_told_before_any_job_runs(loaded: Write) -> None:
    Path("alpha.json").touch()
    loaded(BASE)
    with pytest.raises(
        EyasError, match=r"^run\.yaml:22: datasets\.beta\.v2\.files: beta\.json does not exist; "
    ):
        loaded(BASE, check_files=True)
    Path("beta.json").mkdir()
    with pytest.raises(EyasError, match=r"beta\.json does not exist"):
        loaded(BASE, check_files=True)
    Path("shipped").mkdir()
    Path("beta.json").rmdir()
    Path("shipped/beta.json").touch()
    loaded(BASE, root="shipped", check_files=True)
    assert locate("beta.json", "shipped") == Path("shipped/beta.json")
    assert locate("alpha.json", "shipped") == Path("alpha.json")


def on_the_hub(text: str, files: str) -> str:
    return text.replace("[alpha.json]", f"[{files}]").replace("[beta.json]", f"[{files}]")


def test_a_file_on_the_hub_need_not_be_there_yet(loaded: Write) -> None:
    file = "hub://datasets/a/b@r/data/x.parquet"
    loaded(on_the_hub(BASE, file), check_files=True)
    assert locate(file, "/elsewhere") == Path("data/hub/datasets/a/b/r/data/x.parquet")


@pytest.mark.parametrize("check_files", [False, True])
def test_what_is_on_the_hub_is_named_with_its_revision(loaded: Write, check_files: bool) -> None:
    with pytest.raises(
        EyasError,
        match=r"^run\.yaml:18: datasets\.alpha\.files: hub://datasets/a/b/x\.parquet names no revision; pin one",
    ):
        loaded(on_the_hub(BASE, "hub://datasets/a/b/x.parquet"), check_files=check_files)
    with pytest.raises(
        EyasError, match=r"^run\.yaml:3: model\.tokenizer: hub://a/b names no revision; pin one"
    ):
        loaded(replaced("id: m", "id: m\n  tokenizer: hub://a/b"), check_files=check_files)


def test_a_tokenizer_that_is_not_there_is_told_before_any_job_runs(loaded: Write) -> None:
    text = on_the_hub(replaced("id: m", "id: m\n  tokenizer: models/x"), "hub://datasets/a/b@r/x")
    for _ in range(2):
        with pytest.raises(
            EyasError, match=r"^run\.yaml:3: model\.tokenizer: models/x holds no tokenizer; correct the path"
        ):
            loaded(text, check_files=True)
        Path("models/x").mkdir(parents=True, exist_ok=True)
    Path("models/x/tokenizer.json").touch()
    loaded(text, check_files=True)


def test_defaults_that_leave_no_room_for_a_prompt_are_named(loaded: Write) -> None:
    with pytest.raises(
        EyasError, match=r"^run\.yaml:12: defaults\.sampling\.max_new_tokens: 9,000 tokens leave"
    ):
        loaded(replaced("temperature: 0.6", "max_new_tokens: 9000"))


def test_what_a_dataset_says_itself_is_not_blamed_on_the_defaults(loaded: Write) -> None:
    with pytest.raises(EyasError, match=r"^run\.yaml:23: datasets\.beta\.v2\.rows: expected `int"):
        loaded(replaced("rows: 3", "rows: many"))
    raw = yaml.safe_load(BASE)
    raw["datasets"]["gamma"] = None  # from the command line
    with pytest.raises(EyasError, match=r"^run\.yaml:15: datasets\.gamma: expected `object`"):
        load(raw, [Path("run.yaml")])


def test_a_key_that_all_files_lack_is_told_with_all_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    raw = yaml.safe_load(BASE)
    first.write_text(yaml.safe_dump({"datasets": raw["datasets"]}))
    second.write_text("seed: 1")
    del raw["model"]
    with pytest.raises(EyasError, match=r"first\.yaml, .*second\.yaml: the key `model` is missing; add it"):
        load(raw, [first, second])
    with pytest.raises(EyasError, match=r"^config: the key `model` is missing; add it"):
        load(raw)


def test_of_several_files_the_one_that_says_it_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(BASE)
    second.write_text("\n\nmodel:\n  context: none\n")
    merged = yaml.safe_load(BASE)
    merged["model"]["context"] = "none"
    with pytest.raises(EyasError, match=r"second\.yaml:4: model\.context: expected `int`, got `str`"):
        load(merged, [first, second])
    second.write_text("\n\nmodel:\n  id: n\n")
    with pytest.raises(EyasError, match=r"first\.yaml:3: model\.context: expected `int`, got `str`"):
        load(merged, [first, second])


def test_a_value_from_the_command_line_is_told_without_a_file() -> None:
    raw = yaml.safe_load(BASE) | {"seed": "x"}
    with pytest.raises(EyasError, match=r"^config: seed: expected `int`, got `str`; "):
        load(raw)


# --- meaning ------------------------------------------------------------------------------------------------------


def test_defaults_hold_for_every_dataset_that_does_not_say_otherwise(loaded: Write) -> None:
    config = loaded(BASE)
    alpha, beta = config.datasets["alpha"], config.datasets["beta.v2"]
    assert (alpha.rows, beta.rows) == (8, 3)
    assert (alpha.sampling.temperature, alpha.sampling.top_p) == (0.6, 1.0)
    assert (beta.sampling.temperature, beta.sampling.top_p) == (0.6, 0.9)
    assert alpha.checks == beta.checks == {"degenerate": {"policy": "mark", "max_period": 7}}


def test_null_takes_a_default_back(loaded: Write) -> None:
    assert loaded(replaced("rows: 3", "rows: null")).datasets["beta.v2"].rows is None


def test_checks_are_merged_option_by_option(loaded: Write) -> None:
    config = loaded(BASE + "    checks: {degenerate: {policy: reject}, length: {policy: mark}}\n")
    assert config.datasets["beta.v2"].checks == {
        "degenerate": {"policy": "reject", "max_period": 7},
        "length": {"policy": "mark"},
    }
    assert config.datasets["alpha"].checks == {"degenerate": {"policy": "mark", "max_period": 7}}


PLUGIN = (
    HOOK.replace("Check, Exporter", "Conversation, Skip, Source")
    + """
from msgspec import Struct
class Options(Struct, frozen=True, forbid_unknown_fields=True):
    one: int = 1
    two: int = 2
class Mine(Source):
    name = "mine"
    Options = Options
    def parse(self, row):
        return Skip("never")
@hookimpl
def register_sources(register):
    register(Mine)
"""
)


def test_a_plugin_section_with_another_name_replaces_the_whole(loaded: Write) -> None:
    Path("mine.py").write_text(PLUGIN)
    text = replaced("  rows: 8", "  rows: 8\n  source: {name: mine, one: 5, two: 6}") + "plugins: [mine.py]\n"
    text = text.replace("    source: {name: glaive}\n", "    source: {two: 7}\n")
    config = loaded(text)
    assert config.datasets["alpha"].source == {"name": "mine", "one": 5, "two": 7}
    assert config.datasets["beta.v2"].source == {"name": "sharegpt"}
    assert Stages(config).prompts("alpha").source == {"name": "mine", "one": 5, "two": 7}


SOURCES = sorted(found.cls.name for found in registry().all() if found.kind == "source")


@pytest.mark.parametrize("name", [*SOURCES, "mine"])
@pytest.mark.parametrize("place", ["datasets.alpha", "evaluation_sets.exam"])
def test_an_option_that_a_source_has_not_is_refused(loaded: Write, name: str, place: str) -> None:
    """A stranger's too, whose Options would pass over it."""
    Path("mine.py").write_text(PLUGIN.replace(", forbid_unknown_fields=True", ""))
    section = f"{{name: {name}, colunm: x}}"
    text = BASE if place == "evaluation_sets.exam" else replaced("{name: glaive}", section)
    text += f"evaluation_sets:\n  exam:\n    files: [x.json]\n    source: {section if text == BASE else '{name: chat}'}\n"
    with pytest.raises(EyasError, match=rf"^run\.yaml:\d+: {place}\.source\.colunm: unknown key; "):
        loaded(text + "plugins: [mine.py]\n")


def test_options_without_a_name_are_for_the_plugin_that_a_dataset_names(loaded: Write) -> None:
    text = replaced("{name: glaive}", "{name: text}").replace("name: sharegpt", "{name: text, column: q}")
    text = text.replace("defaults:", "defaults:\n  source: {column: question}")
    config = loaded(text)
    assert config.datasets["alpha"].source == {"name": "text", "column": "question"}
    assert config.datasets["beta.v2"].source == {"name": "text", "column": "q"}
    with pytest.raises(EyasError, match=r"^run\.yaml:10: defaults\.source\.column: unknown key; "):
        loaded(BASE.replace("defaults:", "defaults:\n  source: {column: question}"))


def test_policy_off_may_be_written_without_quotes(loaded: Write) -> None:
    config = loaded(replaced("policy: mark", "policy: off"))
    assert Stages(config).checks("alpha")["degenerate"]["policy"] == "off"
    assert validator().is_valid(yaml.safe_load(replaced("policy: mark", "policy: off")))
    read = yaml.safe_load(BASE + "    checks: {degenerate: {policy: off}}\n")
    assert read["datasets"]["beta.v2"]["checks"]["degenerate"]["policy"] is False
    assert validator().is_valid(read)


def test_a_stage_reads_every_default_filled_in(loaded: Write) -> None:
    stages = Stages(loaded(BASE))
    settings = stages.validate("alpha")
    assert settings.reasoning["opened_by_prompt"] is False and settings.reasoning["close"] == "</think>"
    assert settings.checks["degenerate"]["max_period"] == 7
    assert settings.checks["stop_token"]["policy"] == "reject", "checks that nobody names run too"
    assert stages.generate("alpha").checks is None, "without a budget, checks decide nothing in generate"


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return value


def texts(config: Config) -> list[str]:
    stages = Stages(config)
    made: list[Any] = [stages.mix(), stages.summary(), stages.access(), stages.export("tokens")]
    for name in sorted(config.datasets):
        made += [stages.prompts(name), stages.generate(name), stages.validate(name), stages.train(name)]
    return [canonical(settings) for settings in made]


def test_the_order_of_keys_changes_no_canonical_text() -> None:
    raw = yaml.safe_load(BASE) | {"mix": {"weights": {"alpha": 1, "beta.v2": 2}}}
    raw["model"]["template_options"] = {"thinking": True, "effort": {"b": 1, "a": 2}}
    assert texts(load(raw)) == texts(load(reordered(raw)))
    assert json.dumps(raw) != json.dumps(reordered(raw))


def test_how_a_number_is_written_changes_no_canonical_text() -> None:
    assert texts(load(yaml.safe_load(replaced("0.6", "1")))) == texts(
        load(yaml.safe_load(replaced("0.6", "1.0")))
    )


def test_a_canonical_text_is_one_line_that_reads_back(loaded: Write) -> None:
    settings = Stages(loaded(replaced("temperature: 0.6", 'grammar: "a\\nb é"'))).generate("alpha")
    text = canonical(settings)
    assert "\n" not in text and "é" in text
    assert msgspec.json.decode(text, type=type(settings)) == settings


# --- what is generated from it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [schema.SCHEMA, schema.PAGE], ids=lambda path: path.name)
def test_schema_and_page_are_in_step_with_the_config_classes(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == schema.generate()[path], "run `make docs`"


@lru_cache
def validator() -> jsonschema.Draft202012Validator:
    read = json.loads(schema.SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(read)
    return jsonschema.Draft202012Validator(read)


SHIPPED = sorted([schema.ROOT / "config.yaml", *(schema.ROOT / "configs").rglob("*.yaml")])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_fit_schema_and_classes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(schema.ROOT)
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [error.message for error in validator().iter_errors(raw)] == []
    config = load(raw, [path], schema.ROOT)
    Stages(config, schema.ROOT)


@pytest.mark.parametrize(
    "what",
    [
        "a misspelt key in a dataset",
        "a misspelt key in a section of a dataset",
        "a misspelt key in model",
        "a misspelt section",
        "a misspelt option of a plugin",
        "an option that nothing resembles",
        "a word for a number",
        "a number out of its range",
        "a word for a section",
        "a choice that there is not",
        "no files",
        "weights of no dataset at all",
        "a missing key of the model",
        "a missing key of a plugin",
        "a plugin section without a name",
    ],
)
def test_an_editor_with_the_schema_sees_the_error_too(what: str) -> None:
    assert not validator().is_valid(yaml.safe_load(WRONG[what][0]))


def test_the_schema_finds_nothing_in_a_right_config() -> None:
    assert validator().is_valid(yaml.safe_load(BASE))


def test_the_prompts_of_a_dataset_depend_on_the_evaluation_sets_that_they_are_held_against(
    loaded: Write,
) -> None:
    config = loaded(
        replaced("    rows: 3", "    rows: 3\n    decontaminate: {against: [gsm8k]}") + EVALUATION
    )
    stages = Stages(config)
    assert stages.plugins("prompts", "beta.v2")[0] == ("source", "chat")
    (held,) = stages.prompts("beta.v2").evaluation_sets.values()
    assert held.files == ["x.jsonl"] and held.source["tools"] == "tools", "with the defaults of its source"
    assert stages.prompts("alpha").evaluation_sets == {}


def test_an_evaluation_set_on_the_hub_is_fetched(loaded: Write) -> None:
    file = "hub://datasets/a/b@r/test.parquet"
    stages = Stages(loaded(BASE + EVALUATION.replace("x.jsonl", f'"{file}"')))
    manifest = "data/hub/datasets/a/b/r/test.parquet.manifest.json"
    assert stages.on_the_hub()[manifest] == (file, "evaluation_sets.gsm8k.files")


def test_the_datasets_of_the_readme_are_a_config() -> None:
    (block,) = re.findall(r"(?s)```yaml\n(datasets:.*?)```", (schema.ROOT / "README.md").read_text())
    shipped = yaml.safe_load((schema.ROOT / "config.yaml").read_text())
    config = load(shipped | yaml.safe_load(block))
    assert set(config.datasets) == {"mine", "talks"}


@pytest.mark.parametrize(("policy", "why"), [("retry", r" \(.*rejection sampling\)"), ("keep", "")])
def test_a_policy_that_is_not_offered_is_told_what_there_is(loaded: Write, policy: str, why: str) -> None:
    said = rf"checks\.degenerate\.policy: '{policy}' is not a policy{why}; use reject, mark .* or off"
    with pytest.raises(EyasError, match=said):
        loaded(BASE.replace("policy: mark", f"policy: {policy}"))
