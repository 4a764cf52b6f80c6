"""The config as typed objects: the one definition of every key, its unit, its limits and its default.

`schemas/config.schema.json` and `docs/config.md` are generated from here (eyas.schema). What decides tokens is under
`model:`, how they are served under `server:`; nothing under `server:` ever makes a result stale.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta, Struct, field

from eyas.errors import EyasError
from eyas.hub import file_reference, files_in, is_hub, model_reference, reference, tokenizer_folder
from eyas.plugins import BUILT_IN, Engine, Exporter, OptionsError, Plugin, Registry, Rules, Told, registry

PARAMS_LIMIT = 64_000  # bytes of canonical settings per job; longer texts belong in files that are inputs
LONG_TEXT = (
    4_000  # characters; the summary carries the settings of all jobs and gives a longer text by its digest
)
DATASET_STAGES = ("prompts", "generate", "validate", "stats", "train")


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all config sections: immutable and closed."""


Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Share = Annotated[float, Meta(ge=0, le=1)]


class SamplingConfig(Section, frozen=True):
    """Sampling fields. Every one is sent with every request and is part of the request hash."""

    temperature: Annotated[float, Meta(ge=0, description="Softmax temperature; 0 is greedy.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus mass; 1 is off.")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="Keep the k most likely tokens; 0 is off.")] = 0
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="Drop tokens below this share of the likeliest one; 0 is off.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0, description="Multiplicative penalty on tokens seen before; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[float, Meta(description="Additive penalty on tokens seen; 0 is off.")] = 0.0
    frequency_penalty: Annotated[float, Meta(description="Additive penalty per occurrence; 0 is off.")] = 0.0
    max_new_tokens: Annotated[
        int, Meta(gt=0, description="Most tokens to generate for one answer, reasoning included.")
    ] = 4096
    grammar: Annotated[
        str | None,
        Meta(
            description="Grammar that the answer must follow, in the engine's own notation (GBNF for llamacpp, EBNF for sglang). Rows shaped by it are marked `constrained`: they are off-policy."
        ),
    ] = None
    regex: Annotated[
        str | None,
        Meta(
            description="Regular expression that the whole answer must match, in place of a grammar, for engines that take one (sglang). Such rows are `constrained` too."
        ),
    ] = None

    @property
    def constrained(self) -> bool:
        """Whether something else than the model's own distribution shapes the answer."""
        return self.grammar is not None or self.regex is not None


class ModelConfig(Section, frozen=True):
    """The target model: all that decides which tokens come out. A live server that contradicts it stops the run."""

    id: Annotated[str, Meta(description="Name of the model, as its publisher has it.")]
    revision: Annotated[
        str | None, Meta(description="Commit or tag of the weights, where they have one.")
    ] = None
    sha256: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None,
        Meta(description="SHA-256 of the weight file, for models of one file."),
    ] = None
    quantisation: Annotated[
        str | None, Meta(description="Quantisation of the weights, as the server names it.")
    ] = None
    weight_dtype: Annotated[str | None, Meta(description="Number format of the unquantised weights.")] = None
    kv_dtype: Annotated[str, Meta(description="Number format of the KV cache.")] = "f16"
    context: Annotated[
        int, Meta(gt=0, description="Context length: prompt and answer together must fit, in tokens.")
    ] = 8192
    tokenizer: Annotated[
        str | None,
        Meta(
            description="The model's tokenizer: a folder with its files and chat template, relative to the working directory, or hub://ORG/NAME@REVISION, which rule `fetch` brings. Null for engines that bring their own (llamacpp)."
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Meta(
            description="Run the Python code that the model brings, its tokenizer's here and the rest in the server; read it first. The tokenizer's needs transformers: pip install 'eyas[remote-code]'."
        ),
    ] = False
    tools: Annotated[
        Literal["template", "system"],
        Meta(
            description="How tool definitions reach the model: through the chat template (a prompt with tools is refused if the template drops them), or written into the system message, for models whose template knows no tools."
        ),
    ] = "template"
    template_options: Annotated[
        dict[str, Any], Meta(description="Keyword arguments of the chat template, such as `thinking: true`.")
    ] = field(default_factory=dict)
    reasoning: Annotated[
        dict[str, Any],
        Meta(description="Reasoning format: `name` of the plugin, then its options."),
    ] = field(default_factory=lambda: {"name": "none"})


class LaneConfig(Section, frozen=True):
    """A ceiling of its own for datasets whose answers are long, so that they do not crowd out the short ones."""

    concurrency: Annotated[
        int,
        Meta(gt=0, description="Ceiling of requests in flight, shared by all jobs of the lane's datasets."),
    ]


class ServerConfig(Section, frozen=True):
    """How the model is served and asked. Changing anything here never makes a finished result stale."""

    engine: Annotated[dict[str, Any], Meta(description="Engine: `name` of the plugin, then its options.")]
    url: Annotated[
        str | list[str] | None,
        Meta(
            description="One or more servers that already run, of which one that generates is enough to begin; null starts one on demand and stops it when idle. With https, whom to trust is the system's matter, or that of the environment variable SSL_CERT_FILE."
        ),
    ] = None
    env: Annotated[
        str | None,
        Meta(
            description="Python interpreter of the engine's own environment, which envs/sglang.yaml or envs/llamacpp.yaml makes; null is the one that runs Eyas."
        ),
    ] = None
    api_key_env: Annotated[
        str | None,
        Meta(
            description="Environment variable that holds the API key of `url`. A started server makes its own key."
        ),
    ] = None
    state: Annotated[
        str, Meta(description="Folder of the server lease: endpoint, heartbeats, server log. Ignored by git.")
    ] = ".eyas/server"
    concurrency: Annotated[
        int,
        Meta(
            gt=0,
            description="Ceiling of requests in flight, shared by all jobs of the datasets without a lane. Below it, what the server can hold decides: its queue is kept short and never empty.",
        ),
    ] = 8
    lanes: Annotated[
        dict[Name, LaneConfig],
        Meta(description="Lanes by name, each with a ceiling of its own; a dataset names its lane."),
    ] = field(default_factory=dict)
    retries: Annotated[int, Meta(ge=0, description="How often a request that failed is asked again.")] = 6
    failure_share: Annotated[
        Share, Meta(description="Share of a dataset's requests that may fail for good before its job fails.")
    ] = 0.001
    slowest_rate: Annotated[
        float,
        Meta(gt=0, description="Slowest acceptable rate of one request in tokens/s; decides its deadline."),
    ] = 1.0
    queue_wait: Annotated[
        float,
        Meta(ge=0, description="Longest acceptable wait in the server's queue in s; added to the deadline."),
    ] = 600.0
    start_timeout: Annotated[
        float, Meta(gt=0, description="Longest time a server may take to load, in s.")
    ] = 900.0
    idle_timeout: Annotated[
        float, Meta(gt=0, description="A started server stops when nobody has used it for this long, in s.")
    ] = 30.0
    ignore_doctor: Annotated[
        bool, Meta(description="Generate although `eyas doctor` said NO-GO for this config.")
    ] = False
    restarts: Annotated[int, Meta(ge=0, description="How often a crashed server is started again.")] = 2


CheckPolicy = Literal["reject", "mark", "off"]


class FilterConfig(Section, frozen=True):
    """Prompts to leave out for what the user says in them (system prompt and tools aside). Tokens are the model's matter: a prompt that its context cannot hold is refused later."""

    min_characters: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Least characters that the user says; null is no limit."),
    ] = None
    max_characters: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(description="Most characters that the user says; null is no limit."),
    ] = None
    scripts: Annotated[
        list[str],
        Meta(description="Unicode scripts to keep, such as Latin, Cyrillic or Han; empty keeps all."),
    ] = field(default_factory=list)
    min_script_share: Annotated[
        Share,
        Meta(
            description="Least share of letters in those scripts, together. Half by default, so that a question about a foreign word stays. A text without letters always fits."
        ),
    ] = 0.5


class NearDuplicatesConfig(Section, frozen=True):
    """Leaves out a prompt that is nearly the same as one before it in the fixed order, with equal system prompt and tools."""

    threshold: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Least Jaccard similarity of the n-grams for two prompts to be nearly the same. 0.8 by default: one word changed in forty, or a tenth of the text added; at 0.5 different questions of one template fall together. Candidates come from MinHash, which finds 87 % of the pairs at 0.8 and 99.9 % at 0.9.",
        ),
    ] = 0.8
    words: Annotated[
        int,
        Meta(
            gt=0,
            description="Words in an n-gram; operators and brackets are words too. 5 by default: shorter ones are shared by texts that have only the subject in common, longer ones are broken by each typing error.",
        ),
    ] = 5


class DecontaminateConfig(Section, frozen=True):
    """Leaves out a prompt that holds an item of an evaluation set, by n-gram overlap."""

    against: Annotated[list[str], Meta(min_length=1, description="Names of sets in `evaluation_sets`.")]
    words: Annotated[
        int,
        Meta(
            gt=0,
            description="Words in an n-gram; operators and brackets are words too. 8 by default: long enough that chance and idiom do not repeat it, short enough that a changed word here and there leaves some whole. An item with fewer words is found only as a whole prompt.",
        ),
    ] = 8
    share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Least share of an item's n-grams that a prompt must hold. Half by default: less is mostly a shared instruction (`Solve the following problem …`), and an item that was reworded keeps more.",
        ),
    ] = 0.5


class EvaluationSet(Section, frozen=True):
    """An evaluation set that training prompts can be held against. Its own first user turns are what is looked for."""

    source: Annotated[
        dict[str, Any], Meta(description="How to read it: `name` of the source plugin, then its options.")
    ]
    files: Annotated[
        list[str],
        Meta(min_length=1, description="Its files, local or hub://…, as those of a dataset."),
    ]


class DatasetConfig(Section, frozen=True):
    """One dataset. Keys left out come from `defaults:`."""

    source: Annotated[
        dict[str, Any], Meta(description="Where prompts come from: `name` of the plugin, then its options.")
    ]
    files: Annotated[
        list[str],
        Meta(
            min_length=1,
            description="Source files, relative to the working directory or, for shipped data, to the workflow; or hub://datasets/ORG/NAME@REVISION/PATH, which rule `fetch` brings.",
        ),
    ]
    revision: Annotated[
        str | None, Meta(description="Revision of the dataset, recorded with every prompt.")
    ] = None
    rows: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(description="How many prompts to use, the first n of the fixed order; null uses all."),
    ] = None
    filter: Annotated[FilterConfig, Meta(description="Prompts to leave out for their length or script.")] = (
        field(default_factory=FilterConfig)
    )
    duplicates: Annotated[
        Literal["keep", "drop"],
        Meta(
            description="Prompts that are equal to an earlier one, outer white space aside: kept, each with an answer of its own, since a set may repeat a question on purpose; or dropped."
        ),
    ] = "keep"
    near_duplicates: Annotated[
        NearDuplicatesConfig | None,
        Meta(description="Leave out near-duplicates; null keeps them. `{}` takes the defaults."),
    ] = None
    decontaminate: Annotated[
        DecontaminateConfig | None,
        Meta(description="Leave out what stands in evaluation sets; null keeps it."),
    ] = None
    lane: Annotated[
        str | None,
        Meta(description="Lane of `server.lanes` that the requests go through; decides nothing in a result."),
    ] = None
    turns: Annotated[
        Literal["first", "all"],
        Meta(
            description="Which turns of a recorded conversation the model answers: the first, or all, each with its own earlier answers as history. What the user said next is taken as recorded. Results of tools are taken as recorded where the model makes the recorded calls; else the conversation ends there, and its later turns are not reached. Changing it to `all` asks for later turns only."
        ),
    ] = "first"
    samples: Annotated[
        int, Meta(gt=0, description="Answers per prompt; with `turns: all`, conversations per prompt.")
    ] = 1
    sampling: Annotated[SamplingConfig, Meta(description="Sampling fields.")] = field(
        default_factory=SamplingConfig
    )
    reasoning_required: Annotated[
        bool,
        Meta(
            description="The answers are expected to reason; the run stops if the first 20 show no reasoning at all."
        ),
    ] = True
    budget_tokens: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(
            description="Stop at this many accepted output tokens, taken in the fixed order; null is no budget."
        ),
    ] = None
    checks: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="Per check: `policy` (reject, mark or off), then its options. Checks not named here run with their defaults."
        ),
    ] = field(default_factory=dict)


class MixConfig(Section, frozen=True):
    """How the datasets become one training set."""

    weights: Annotated[
        Annotated[dict[str, Annotated[float, Meta(gt=0)]], Meta(min_length=1)] | None,
        Meta(
            description="Share of supervised tokens per dataset, relative to each other; no row is used twice, so the scarcest dataset decides the size. A dataset without a weight gives nothing, to neither side. Null takes everything of every dataset."
        ),
    ] = None
    eval_share: Annotated[
        Share, Meta(description="Share of prompts held out, by hash of the normalised prompt.")
    ] = 0.01


class PlanConfig(Section, frozen=True):
    """What `snakemake plan` measures, and what it cannot and takes from here."""

    prompts: Annotated[
        int,
        Meta(
            gt=1,
            description="Prompts per dataset that the pilot asks, the first of the fixed order. Their answers are the run's own, so none is wasted.",
        ),
    ] = 64
    minutes: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest time of the pilot, in minutes. Answers that are still running then count as longer than they are, not as short ones; the run asks for them again.",
        ),
    ] = 20.0
    drift_sd: Annotated[
        Share,
        Meta(
            description="How much the server's speed wanders over hours, which a pilot cannot see: standard deviation of its logarithm. 0.08 is 8 %."
        ),
    ] = 0.08
    drift_hours: Annotated[
        float,
        Meta(
            gt=0, description="How long the speed stays away from its mean once it is: correlation time in h."
        ),
    ] = 2.0
    gpus: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(
            description="GPUs of all servers together, for GPU-hours. null is what SGLang says: one for each tensor-, data- and pipeline-parallel rank (with data-parallel attention, whose ranks share them, each counts once); of llama.cpp it is none."
        ),
    ] = None
    hidden_size: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(
            description="Hidden size of the target model, for the disk that its hidden states would take; null leaves that out."
        ),
    ] = None
    hidden_layers: Annotated[
        int,
        Meta(
            gt=0,
            description="Hidden states kept per token. EAGLE-3 reads three layers, and trainers keep the last one too.",
        ),
    ] = 4


class AuditConfig(Section, frozen=True):
    """The drift audit of a run: the same prompts, asked greedily again and again."""

    minutes: Annotated[float, Meta(gt=0, description="Minutes from one round to the next.")] = 30.0
    prompts: Annotated[
        int,
        Meta(
            ge=2,
            description="Prompts per dataset, the first of the fixed order. A step is told if more than half of them take it.",
        ),
    ] = 8
    max_new_tokens: Annotated[
        int,
        Meta(
            gt=0,
            description="Most tokens of one answer, if the dataset's own limit is not lower. Answers that are cut here tell nothing by their length, but each round costs up to `prompts` times this, per dataset.",
        ),
    ] = 1024


class Config(Section, frozen=True):
    """A run."""

    model: ModelConfig
    server: ServerConfig
    datasets: Annotated[
        dict[Name, DatasetConfig],
        Meta(min_length=1, description="The datasets by name; the name is the folder under results/."),
    ]
    defaults: Annotated[
        dict[str, Any], Meta(description="Values for every dataset that does not set them itself; same keys.")
    ] = field(default_factory=dict)
    evaluation_sets: Annotated[
        dict[Name, EvaluationSet],
        Meta(description="Evaluation sets by name, for `decontaminate` of the datasets."),
    ] = field(default_factory=dict)
    seed: Annotated[
        int, Meta(description="Decides the fixed order of prompts and the shuffle of the mix.")
    ] = 0
    mix: MixConfig = field(default_factory=MixConfig)
    exports: Annotated[
        dict[str, dict[str, Any]], Meta(description="Exporters to run: name, then options.")
    ] = field(default_factory=lambda: {"tokens": {}})
    plan: PlanConfig = field(default_factory=PlanConfig)
    audit: Annotated[
        AuditConfig | None,
        Meta(
            description="Ask a few prompts of each dataset greedily again and again while it is generated, and raise an alarm when their answers change in a step. They go to `logs/generate/<dataset>.audit.jsonl`, never into the journal. Null asks nothing; `{}` takes the defaults."
        ),
    ] = None
    journal: Annotated[
        str,
        Meta(
            description="Folder of finished responses, the expensive part, outside results/. No rule deletes it; back it up."
        ),
    ] = "journal"
    plugins: Annotated[
        list[str], Meta(description="Plugin files, relative to the working directory or to the workflow.")
    ] = field(default_factory=list)
    rules: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="Rules that plugins bring: name, then options. Those not named here are not loaded."
        ),
    ] = field(default_factory=dict)


# --- reading -----------------------------------------------------------------------------------------------------


class ConfigSource:
    """The config files behind a config dict, kept to tell at which line a key stands."""

    def __init__(self, files: Sequence[str | Path] = ()) -> None:
        self.files = [Path(file) for file in files]

    def start(self, path: Sequence[str]) -> str:
        """How an error about the key at `path` begins: `file:line: key`.

        The line is the key's or its nearest parent's. A dataset's key that stands under `defaults` is named as such.
        What concerns the config as a whole is told with all files.
        """
        if not path:
            return ", ".join(map(str, self.files)) or "config"
        depth, place = self._deepest(path)
        if path[0] == "datasets" and depth < len(path) and len(path) > 2:
            shared = ["defaults", *path[2:]]
            below, shared_place = self._deepest(shared)
            if below == len(shared):
                path, place = shared, shared_place
        return f"{place}: {'.'.join(path)}"

    def _deepest(self, path: Sequence[str]) -> tuple[int, str]:
        best: tuple[int, str] = (0, "config")
        for file in self.files:
            try:
                node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
            except (OSError, yaml.YAMLError):
                continue
            for depth, key in enumerate(path, start=1):
                child = _child(node, key)
                if child is None:
                    break
                node, line = child
                if depth >= best[0]:
                    best = (depth, f"{file}:{line}")
        return best


def _child(node: Any, key: str) -> tuple[Any, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            if key_node.value == key:
                return value, key_node.start_mark.line + 1
    return None


def read_yaml(file: Path) -> Any:
    """What stands in a config file. Raises OSError, and EyasError with its line for one that is no YAML."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise EyasError(f"{file}{line}: not valid YAML: {error.problem}; correct it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EyasError(f"{file}: not valid YAML: {' '.join(str(error).split())}; correct it") from None


def load(
    raw: Mapping[str, Any],
    files: Sequence[str | Path] = (),
    root: str | Path = ".",
    *,
    check_files: bool = False,
) -> Config:
    """The typed config of a config dict (as Snakemake merges it), plugin sections checked.

    files: the config files, for line numbers. root: the workflow's folder, where shipped files lie. check_files: whether
    source files must exist.
    Raises EyasError, one line that names file, line, key and remedy.
    """
    source = ConfigSource(files)
    _refuse_endless(raw, (), source)
    merged = dict(raw)
    datasets, defaults = raw.get("datasets"), raw.get("defaults") or {}
    if isinstance(datasets, Mapping) and isinstance(defaults, Mapping):
        merged["datasets"] = {
            name: _merge(defaults, section) if isinstance(section, Mapping) else section
            for name, section in datasets.items()
        }
        for name, section in merged["datasets"].items():
            _convert(section, DatasetConfig, ("datasets", str(name)), source)
    config = _convert(merged, Config, (), source)
    try:
        found = registry(tuple(str(locate(file, root)) for file in config.plugins))
    except EyasError as error:
        raise EyasError(f"{source.start(['plugins'])}: {error}") from error
    try:
        _check(config, found)
        if check_files:
            _check_files(config, root)
    except OptionsError as error:
        path = _keys(error.where, merged)
        raise EyasError(_explain(error.error, error.options, path, source)) from None
    except EyasError as error:
        where, _, rest = str(error).partition(": ")
        raise EyasError(f"{source.start(_keys(where, merged))}: {rest}") from None
    return config


def _refuse_endless(value: Any, path: tuple[str, ...], source: ConfigSource) -> None:
    """Settings travel to the jobs as JSON, which has neither infinity nor NaN."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_endless(inner, (*path, str(key)), source)
    elif isinstance(value, float) and not math.isfinite(value):
        raise EyasError(f"{source.start(path)}: {value} is no number that can be used; write a finite one")


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, sections merged key by key; a plugin section with another `name` replaces the whole.

    Options without a name are for whatever plugin is named above them.
    """
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(below, Mapping)
            and value.get("name", below.get("name")) == below.get("name", value.get("name"))
        ):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _keys(where: str, section: Any) -> tuple[str, ...]:
    """A dotted path as keys of `section`, whose own keys may hold dots."""
    known = map(str, section) if isinstance(section, Mapping) else ()
    fitting = [key for key in known if f"{where}.".startswith(f"{key}.")]
    key = max(fitting, key=len, default=where.partition(".")[0])
    rest = where[len(key) + 1 :]
    below = section.get(key) if isinstance(section, Mapping) else None
    return (key, *_keys(rest, below)) if rest else (key,)


LOGGED = ("export", "fetch", "benchmarks")  # folders of logs/ besides those of DATASET_STAGES
RESERVED = ("train", "plan", "summary")  # folders of results/ that are no datasets
RESULTS = "results"  # in the working directory


def _check_files(config: Config, root: str | Path) -> None:
    listed = {f"datasets.{name}": section.files for name, section in config.datasets.items()}
    listed |= {f"evaluation_sets.{name}": section.files for name, section in config.evaluation_sets.items()}
    for where, files in listed.items():
        for file in files:
            if not is_hub(file) and not locate(file, root).is_file():
                raise EyasError(
                    f"{where}.files: {file} does not exist; correct the path (it is relative to the "
                    f"working directory or, for shipped data, to the workflow)"
                )

    tokenizer = config.model.tokenizer
    if tokenizer is not None and not is_hub(tokenizer) and not files_in(Path(tokenizer), code=True):
        raise EyasError(
            f"model.tokenizer: {tokenizer} holds no tokenizer; correct the path (a folder, relative to the working "
            f"directory), or write hub://ORG/NAME@REVISION"
        )


def _check(config: Config, found: Registry) -> None:
    """What types cannot say: plugin sections, names that refer to each other."""
    _check_journal(config.journal)
    if config.model.tokenizer is not None and is_hub(config.model.tokenizer):
        _check_reference(model_reference, config.model.tokenizer, "model.tokenizer")
    options = plugin(found, "engine", config.server.engine, "server.engine")
    plugin(found, "reasoning", config.model.reasoning, "model.reasoning")
    for name in config.exports:
        found.options("exporter", name, config.exports[name], f"exports.{name}")
        if config.model.tokenizer is None and _takes_text(
            found.find("exporter", name, f"exports.{name}").cls
        ):
            raise EyasError(
                f"exports.{name}: writes text, so it needs the model's tokenizer; set model.tokenizer, or use the exporter tokens"
            )
    for name in config.rules:
        found.options("rules", name, config.rules[name], f"rules.{name}")
        if name in (*RESERVED, *DATASET_STAGES, *LOGGED, *config.datasets):
            owner = "dataset" if name in config.datasets else "run"
            raise EyasError(
                f"rules.{name}: results/{name}/ or logs/{name}/ belongs to the {owner} of that name; rename one"
            )
    for dataset, section in config.datasets.items():
        if dataset in RESERVED:
            raise EyasError(
                f"datasets.{dataset}: the name is reserved for results/{dataset}/; choose another"
            )
        if section.sampling.max_new_tokens >= config.model.context:
            raise EyasError(
                f"datasets.{dataset}.sampling.max_new_tokens: {section.sampling.max_new_tokens:,} tokens leave no room for a "
                f"prompt in model.context of {config.model.context:,}; lower it, or raise model.context"
            )
        if section.lane is not None and section.lane not in config.server.lanes:
            raise EyasError(
                f"datasets.{dataset}.lane: no lane {section.lane!r} in server.lanes; {_nearest(section.lane, list(config.server.lanes))}"
            )
        if section.sampling.grammar is not None and section.sampling.regex is not None:
            raise EyasError(
                f"datasets.{dataset}.sampling.regex: an answer cannot be held to a grammar and a regular expression at once; remove one"
            )
        plugin(found, "source", section.source, f"datasets.{dataset}.source")
        for file in filter(is_hub, section.files):
            _check_reference(file_reference, file, f"datasets.{dataset}.files")
        _check_selection(config, dataset, section)
        for check in section.checks:
            check_settings(found, check, section.checks[check], f"datasets.{dataset}.checks.{check}")
    for name, evaluation in config.evaluation_sets.items():
        plugin(found, "source", evaluation.source, f"evaluation_sets.{name}.source")
        for file in filter(is_hub, evaluation.files):
            _check_reference(file_reference, file, f"evaluation_sets.{name}.files")
    engine = found.create("engine", options.pop("name"), options, "server.engine", config.model)
    assert isinstance(engine, Engine)
    engine.check_config(
        {f"datasets.{name}.sampling": dataset.sampling for name, dataset in config.datasets.items()}
    )
    for name in config.mix.weights or {}:
        if name not in config.datasets:
            raise EyasError(
                f"mix.weights.{name}: no dataset of that name; {_nearest(name, list(config.datasets))}"
            )


def _check_journal(folder: str) -> None:
    """Results may be deleted and made again from the journal, so neither folder may lie in the other, whatever links say."""
    journal, results = Path(folder).resolve(), Path(RESULTS).resolve()
    if journal.is_relative_to(results):
        raise EyasError(
            f"journal: {folder or '.'} lies in {RESULTS}/, and would be deleted with it, finished answers and all; name a "
            f"folder outside, such as `journal`"
        )
    if results.is_relative_to(journal):
        raise EyasError(
            f"journal: {RESULTS}/ lies in {folder or '.'}, where results and finished answers would mix; name a folder of its "
            f"own, such as `journal`"
        )


def _check_selection(config: Config, dataset: str, section: DatasetConfig) -> None:
    wanted = section.filter
    least, most = wanted.min_characters or 0, wanted.max_characters
    if most is not None and least > most:
        raise EyasError(
            f"datasets.{dataset}.filter.min_characters: {least:,} is more than max_characters, so nothing fits; lower it"
        )
    if wanted.scripts:
        import regex

        for script in wanted.scripts:
            try:
                regex.compile(rf"\p{{Script={script}}}")
            except regex.error:
                raise EyasError(
                    f"datasets.{dataset}.filter.scripts: Unicode has no script {script!r}; names are as in Latin, Cyrillic, Han"
                ) from None
    for name in section.decontaminate.against if section.decontaminate else ():
        if name not in config.evaluation_sets:
            raise EyasError(
                f"datasets.{dataset}.decontaminate.against: no set {name!r} in evaluation_sets; {_nearest(name, list(config.evaluation_sets))}"
            )


def _takes_text(exporter: type[Plugin]) -> bool:
    assert issubclass(exporter, Exporter)
    return exporter.takes is Told


def _check_reference(read: Callable[[str], object], text: str, where: str) -> None:
    try:
        read(text)
    except ValueError as error:
        raise EyasError(f"{where}: {error}") from None


def plugin(found: Registry, kind: str, section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A `{name, options…}` section with the plugin's defaults filled in."""
    name = section.get("name")
    if not isinstance(name, str):
        raise EyasError(f"{where}: needs a `name`, the {kind} plugin to use")
    options = found.options(
        kind, name, {key: value for key, value in section.items() if key != "name"}, where
    )
    return {"name": name, **msgspec.to_builtins(options)}


def check_settings(found: Registry, name: str, section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A check's section with policy and defaults filled in."""
    cls = found.find("check", name, where).cls
    policy = section.get("policy", cls.default_policy)  # type: ignore[attr-defined]
    if policy is False:
        policy = "off"  # as YAML 1.1 reads it without quotes
    if policy not in ("reject", "mark", "off"):
        why = " (asking again until an answer is short or whole would be rejection sampling)" * (
            policy == "retry"
        )
        raise EyasError(
            f"{where}.policy: {policy!r} is not a policy{why}; use reject, mark (which keeps and counts) or off"
        )
    options = found.options("check", name, {k: v for k, v in section.items() if k != "policy"}, where)
    return {"policy": policy, **msgspec.to_builtins(options)}


def locate(path: str | Path, root: str | Path) -> Path:
    """`path` relative to the working directory or, if it is not there, to the workflow's folder `root`.

    A file on the hub is where rule `fetch` puts it.
    """
    if is_hub(str(path)):
        return file_reference(str(path)).place
    here, shipped = Path(path), Path(root) / path
    return here if here.exists() or not shipped.exists() else shipped


def watched(path: str, root: str | Path) -> Path:
    """What tells that a source file has changed: the file itself, or the manifest of one on the hub."""
    return file_reference(path).manifest if is_hub(path) else locate(path, root)


# --- one-line errors ---------------------------------------------------------------------------------------------

_AT = re.compile(r" - at `(?P<key>key in )?\$(?P<path>[^`]*)`$|(?P<keys> - at `key` in `\$(?P<of>[^`]*)`)$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")
T = TypeVar("T", bound=Struct)


def _convert(raw: Any, section: type[T], prefix: tuple[str, ...], source: ConfigSource) -> T:
    try:
        return msgspec.convert(raw, section, strict=False)
    except msgspec.ValidationError as error:
        raise EyasError(_explain(error, section, prefix, source)) from None


def _explain(
    error: msgspec.ValidationError, section: type[Struct], prefix: tuple[str, ...], source: ConfigSource
) -> str:
    """msgspec's message as file, line, key and remedy. `prefix` is where `section` stands in the config."""
    text = str(error)
    at = _AT.search(text)
    message = text[: at.start()] if at else text
    inner = tuple(part for part in re.split(r"[.\[\]]+", (at["path"] or at["of"]) if at else "") if part)
    path = prefix + inner
    if unknown := _UNKNOWN.match(message):
        path += (unknown["name"],)
        message = f"unknown key; {_nearest(unknown['name'], _keys_at(section, inner, prefix))}"
    elif missing := _MISSING.match(message):
        message = f"the key `{missing['name']}` is missing; add it (docs/config.md describes it)"
    else:
        remedy = "docs/config.md lists what is allowed"
        if message.startswith(("Invalid enum value", "Expected `str")) and (
            choices := _choices(_type_at(section, inner))
        ):
            *others, last = map(str, choices)
            remedy = f"use {', '.join(others)}{' or ' * bool(others)}{last}"
        elif at and at["keys"]:
            remedy = "names here are text of letters, digits, `.`, `_` and `-` (a number needs quotes)"
        message = f"{message[:1].lower()}{message[1:]}; {remedy}"
    return f"{source.start(path)}: {message}"


def _keys_at(section: type[Struct], path: Sequence[str], prefix: Sequence[str]) -> list[str]:
    kind = _section_in(_type_at(section, path)) or Struct
    extra = ["policy"] if "checks" in prefix[2:3] else []
    return [*extra, *(f.encode_name for f in msgspec.structs.fields(kind))]


def _type_at(section: type[Struct], path: Sequence[str]) -> Any:
    """The type of the field at `path`, `section` itself if that is empty; None if there is no such field."""
    kind: Any = section
    for part in path:
        fields = msgspec.structs.fields(_section_in(kind) or Struct)
        kind = next((f.type for f in fields if f.encode_name == part), None)
    return kind


def _choices(kind: Any) -> tuple[Any, ...]:
    """The values of a field that takes one of a few, alone, by name or beside null; empty for any other."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next(filter(None, map(_choices, get_args(kind))), ())


def _section_in(kind: Any) -> type[Struct] | None:
    """The section that a field of type `kind` holds: itself, or null, or some by name."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    return next(filter(None, map(_section_in, get_args(kind))), None)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(known) or 'none'}"


# --- what each stage reads ---------------------------------------------------------------------------------------


class PromptsSettings(Section, frozen=True):
    """What decides prompts.jsonl.zst. evaluation_sets: those that `decontaminate` names."""

    dataset: str
    source: dict[str, Any]
    revision: str | None
    rows: int | None
    turns: Literal["first", "all"]
    filter: FilterConfig
    duplicates: Literal["keep", "drop"]
    near_duplicates: NearDuplicatesConfig | None
    decontaminate: DecontaminateConfig | None
    evaluation_sets: dict[str, EvaluationSet]
    seed: int


class GenerateSettings(Section, frozen=True):
    """What decides responses.jsonl.zst. `checks` is set only under a budget, which counts accepted tokens."""

    dataset: str
    model: ModelConfig
    sampling: SamplingConfig
    turns: Literal["first", "all"]
    samples: int
    reasoning_required: bool
    budget_tokens: int | None
    checks: dict[str, dict[str, Any]] | None


class PilotSettings(Section, frozen=True):
    """What decides a pilot: what it asks, and the server whose speed it measures. generate: without a budget."""

    generate: GenerateSettings
    checks: dict[str, dict[str, Any]]
    prompts: int
    server: ServerConfig


class PlannedDataset(Section, frozen=True):
    """What the plan must know of a dataset besides its pilot."""

    budget_tokens: int | None
    max_new_tokens: int
    lane: str | None


class PlanSettings(Section, frozen=True):
    """What decides results/plan/. model: its name."""

    model: str
    plan: PlanConfig
    server: ServerConfig
    datasets: dict[str, PlannedDataset]


class ValidateSettings(Section, frozen=True):
    """What decides verdicts.parquet."""

    dataset: str
    reasoning: dict[str, Any]
    checks: dict[str, dict[str, Any]]


class StatsSettings(Section, frozen=True):
    """What decides stats.json. `samples` says how many answers were planned, independently of what became of them."""

    dataset: str
    samples: int


class TrainSettings(Section, frozen=True):
    """What decides train.parquet."""

    dataset: str


class ExportSettings(Section, frozen=True):
    """What decides one export. `model` is set only for exporters of text, which need its tokenizer."""

    exporter: str
    options: dict[str, Any]
    model: ModelConfig | None = None


class MixSettings(Section, frozen=True):
    """What decides results/train/."""

    datasets: list[str]
    weights: dict[str, float] | None
    eval_share: float
    seed: int


class SummarySettings(Section, frozen=True):
    """What decides results/summary/: the settings of every job before it.

    jobs: by stage and subject (see Stages.jobs), each setting as its place in `values`. Equal values stand once, since
    all jobs must fit one command line and most of them share the model, the checks and a grammar.
    plugins: of strangers, as far as they decide a result: kind, name, where from, digest.
    """

    datasets: list[str]
    jobs: dict[str, dict[str, dict[str, int]]]
    values: list[Any]
    plugins: list[dict[str, str]]

    def job(self, stage: str, subject: str) -> dict[str, Any]:
        """The settings of one job; a text longer than LONG_TEXT is given by its SHA-256."""
        return {key: self.values[place] for key, place in self.jobs[stage][subject].items()}


class AccessSettings(Section, frozen=True):
    """How `generate` and `serve` reach a server. Travels as a resource: it decides nothing in a result.

    checks, plan: what answers are judged by as they come, and the file with the planned speed, if there is one; for alarms.
    audit: what is asked again and again while a dataset is generated.
    config: fingerprint of the whole config, by which verdicts of `eyas doctor` are kept.
    """

    model: ModelConfig
    server: ServerConfig
    plugins: list[str]
    lane: str | None = None
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    plan: str | None = None
    audit: AuditConfig | None = None
    config: str = ""

    @property
    def ceiling(self) -> int:
        """Most requests in flight of the lane."""
        return self.server.concurrency if self.lane is None else self.server.lanes[self.lane].concurrency


class PluginRules(Section, frozen=True):
    """A Snakemake module that a plugin brings: its file, its `config`, and what a plain `snakemake` builds of it."""

    snakefile: str
    config: dict[str, Any]
    targets: list[str]


class Stages:
    """The settings of each stage of a run, exactly what that stage reads, defaults filled in."""

    def __init__(self, config: Config, root: str | Path = ".") -> None:
        self.config = config
        self.plugin_files = tuple(str(locate(file, root)) for file in config.plugins)
        self.registry = registry(self.plugin_files)
        reasoning = plugin(self.registry, "reasoning", config.model.reasoning, "model.reasoning")
        self.model = msgspec.structs.replace(config.model, reasoning=reasoning)

    def prompts(self, dataset: str) -> PromptsSettings:
        section = self.config.datasets[dataset]
        return PromptsSettings(
            dataset=dataset,
            source=plugin(self.registry, "source", section.source, f"datasets.{dataset}.source"),
            revision=section.revision,
            rows=section.rows,
            turns=section.turns,
            filter=section.filter,
            duplicates=section.duplicates,
            near_duplicates=section.near_duplicates,
            decontaminate=section.decontaminate,
            evaluation_sets={
                name: EvaluationSet(
                    source=plugin(self.registry, "source", held.source, f"evaluation_sets.{name}.source"),
                    files=held.files,
                )
                for name, held in self.evaluation_sets(dataset).items()
            },
            seed=self.config.seed,
        )

    def evaluation_sets(self, dataset: str) -> dict[str, EvaluationSet]:
        """The evaluation sets that a dataset's prompts are held against, by name."""
        held = self.config.datasets[dataset].decontaminate
        return {name: self.config.evaluation_sets[name] for name in sorted(set(held.against))} if held else {}

    def generate(self, dataset: str) -> GenerateSettings:
        section = self.config.datasets[dataset]
        return GenerateSettings(
            dataset=dataset,
            model=self.model,
            sampling=section.sampling,
            turns=section.turns,
            samples=section.samples,
            reasoning_required=section.reasoning_required,
            budget_tokens=section.budget_tokens,
            checks=self.checks(dataset) if section.budget_tokens is not None else None,
        )

    def pilot(self, dataset: str) -> PilotSettings:
        return PilotSettings(
            generate=msgspec.structs.replace(self.generate(dataset), budget_tokens=None, checks=None),
            checks=self.checks(dataset),
            prompts=self.config.plan.prompts,
            server=self.config.server,
        )

    def plan(self) -> PlanSettings:
        sections = self.config.datasets
        return PlanSettings(
            model=self.model.id,
            plan=self.config.plan,
            server=self.config.server,
            datasets={
                name: PlannedDataset(
                    budget_tokens=section.budget_tokens,
                    max_new_tokens=section.sampling.max_new_tokens,
                    lane=section.lane,
                )
                for name, section in sorted(sections.items())
            },
        )

    def validate(self, dataset: str) -> ValidateSettings:
        return ValidateSettings(dataset=dataset, reasoning=self.model.reasoning, checks=self.checks(dataset))

    def stats(self, dataset: str) -> StatsSettings:
        return StatsSettings(dataset=dataset, samples=self.config.datasets[dataset].samples)

    def train(self, dataset: str) -> TrainSettings:
        return TrainSettings(dataset=dataset)

    def export(self, exporter: str) -> ExportSettings:
        options = self.registry.options(
            "exporter", exporter, self.config.exports[exporter], f"exports.{exporter}"
        )
        return ExportSettings(
            exporter=exporter,
            options=msgspec.to_builtins(options),
            model=self.model if self.exports_text(exporter) else None,
        )

    def exports_text(self, exporter: str) -> bool:
        """Whether an exporter needs prompts and tokenizer besides the training rows."""
        found = self.registry.find("exporter", exporter, f"exports.{exporter}")
        return _takes_text(found.cls)

    def mix(self) -> MixSettings:
        mix = self.config.mix
        return MixSettings(
            datasets=sorted(self.config.datasets),
            weights=mix.weights,
            eval_share=mix.eval_share,
            seed=self.config.seed,
        )

    def jobs(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Every job whose results the summary tells of: stage, subject, and what stage and digest are called with.

        The subject is a dataset, an exporter or, for the mix, the folder of the training set.
        """
        for stage in DATASET_STAGES:
            for name in sorted(self.config.datasets):
                yield stage, name, {"dataset": name}
        yield "mix", "train", {}
        for name in sorted(self.config.exports):
            yield "export", name, {"exporter": name}

    def summary(self) -> SummarySettings:
        jobs: dict[str, dict[str, dict[str, int]]] = {}
        places: dict[str, int] = {}
        for stage, subject, arguments in self.jobs():
            settings = _without_long_texts(msgspec.to_builtins(getattr(self, stage)(**arguments)))
            jobs.setdefault(stage, {})[subject] = {
                key: places.setdefault(_line(settings[key]), len(places)) for key in sorted(settings)
            }
        used = {one for stage, _, arguments in self.jobs() for one in self.plugins(stage, **arguments)}
        strangers = [one for kind, name in sorted(used) if (one := self.stranger(kind, name))]
        return SummarySettings(
            datasets=sorted(self.config.datasets),
            jobs=jobs,
            values=[json.loads(text) for text in places],
            plugins=strangers,
        )

    def stranger(self, kind: str, name: str) -> dict[str, str] | None:
        """A plugin as the manifest names it, of a file by the file's name alone; None for one of Eyas' own."""
        found = self.registry.find(kind, name, kind)
        if found.origin == BUILT_IN:
            return None
        origin = Path(found.origin).name if found.origin in self.plugin_files else found.origin
        return {"kind": kind, "name": name, "from": origin, "digest": found.digest}

    def access(self, dataset: str | None = None) -> AccessSettings:
        """How `generate` of a dataset, or `serve`, reaches a server."""
        lane = self.config.datasets[dataset].lane if dataset is not None else None
        return AccessSettings(
            model=self.model,
            server=self.config.server,
            plugins=list(self.plugin_files),
            lane=lane,
            checks=self.checks(dataset) if dataset is not None else {},
            plan="results/plan/plan.json",
            audit=self.config.audit,
            # `defaults` are in the datasets already, where it does not matter how they are written.
            config=fingerprint(msgspec.structs.replace(self.config, defaults={})),
        )

    def on_the_hub(self) -> dict[str, tuple[str, str]]:
        """What rule `fetch` brings: by its manifest, its name on the hub and the config key that asks for it."""
        asked = {"model.tokenizer": [self.model.tokenizer or ""]}
        asked |= {f"datasets.{name}.files": section.files for name, section in self.config.datasets.items()}
        asked |= {
            f"evaluation_sets.{name}.files": held.files for name, held in self.config.evaluation_sets.items()
        }
        return {
            str(reference(text).manifest): (text, key)
            for key, texts in reversed(asked.items())  # so that the first of several keys is named
            for text in filter(is_hub, texts)
        }

    def tokenizer_files(self) -> list[str]:
        """What tells that the tokenizer has changed: its files, or the manifest of one on the hub."""
        if self.model.tokenizer is None:
            return []
        if is_hub(self.model.tokenizer):
            return [str(model_reference(self.model.tokenizer).manifest)]
        folder = tokenizer_folder(self.model.tokenizer)
        return [str(folder / name) for name in files_in(folder, code=self.model.trust_remote_code)]

    def export_name(self, exporter: str, side: str) -> str:
        """Name of an exporter's file or folder. side: train or eval."""
        suffix: str = self.registry.find("exporter", exporter, f"exports.{exporter}").cls.suffix  # type: ignore[attr-defined]
        return f"{side}.{suffix}" if suffix else side

    def export_suffixes(self) -> list[str]:
        """The suffixes of all installed exporters that write a file."""
        exporters = [found.cls for found in self.registry.all() if found.kind == "exporter"]
        return sorted({exporter.suffix for exporter in exporters} - {""})  # type: ignore[attr-defined]

    def plugin_rules(self) -> dict[str, PluginRules]:
        """The rules that plugins bring to this run, by plugin."""
        datasets = list(self.config.datasets)
        found: dict[str, PluginRules] = {}
        for name, section in self.config.rules.items():
            plugin = self.registry.create("rules", name, section, f"rules.{name}")
            assert isinstance(plugin, Rules)
            if not plugin.snakefile.is_file():
                raise EyasError(
                    f"rules.{name}: {plugin.snakefile} does not exist; correct `snakefile` of the plugin, or install the file with it"
                )
            found[name] = PluginRules(
                snakefile=str(plugin.snakefile),
                config={"options": msgspec.to_builtins(plugin.options), "datasets": datasets},
                targets=plugin.targets(datasets),
            )
        return found

    def checks(self, dataset: str) -> dict[str, dict[str, Any]]:
        """Every check with its policy and options; those that the config does not name run with their defaults."""
        sections = self.config.datasets[dataset].checks
        names = [found.cls.name for found in self.registry.all() if found.kind == "check"]
        return {
            name: check_settings(
                self.registry, name, sections.get(name, {}), f"datasets.{dataset}.checks.{name}"
            )
            for name in names
        }

    def plugins(
        self, stage: str, dataset: str | None = None, exporter: str | None = None
    ) -> list[tuple[str, str]]:
        """(kind, name) of the plugins whose code decides the output of `stage`."""
        used: list[tuple[str, str]] = [("exporter", exporter)] if exporter else []
        if stage == "prompts" and dataset:
            sections = [held.source for held in self.evaluation_sets(dataset).values()]
            sections.append(self.config.datasets[dataset].source)
            used += [("source", name) for name in sorted({section["name"] for section in sections})]
        budgeted = dataset is not None and self.config.datasets[dataset].budget_tokens is not None
        if stage in ("generate", "pilot", "validate") or (exporter and self.exports_text(exporter)):
            used.append(("reasoning", self.model.reasoning["name"]))
        if dataset and (stage in ("pilot", "validate") or (stage == "generate" and budgeted)):
            used += [
                ("check", name)
                for name, section in self.checks(dataset).items()
                if section["policy"] != "off"
            ]
        return used


def canonical(settings: Section) -> str:
    """One line of JSON, keys sorted: equal settings give equal text whatever the order in the config file."""
    value = msgspec.to_builtins(settings)
    text = _line(value)
    if (size := len(text.encode())) > PARAMS_LIMIT:
        dataset = f"datasets.{value['dataset']}: " if "dataset" in value else ""
        raise EyasError(
            f"{dataset}the settings of one job take {size:,} bytes, more than the {PARAMS_LIMIT:,} that a command line "
            f"safely holds; shorten `{'.'.join(_longest(value)[1])}`"
        )
    return text


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _without_long_texts(value: Any) -> Any:
    if isinstance(value, str) and len(value) > LONG_TEXT:
        return {"sha256": hashlib.sha256(value.encode()).hexdigest(), "characters": len(value)}
    if isinstance(value, dict):
        return {key: _without_long_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_long_texts(item) for item in value]
    return value


def _longest(value: Any) -> tuple[int, list[str]]:
    """Length and path of the longest single value within `value`."""
    if not isinstance(value, dict) or not value:
        return len(str(value)), []
    inner = {key: _longest(item) for key, item in value.items()}
    key = max(inner, key=lambda key: inner[key][0])
    return inner[key][0], [key, *inner[key][1]]


def fingerprint(value: Any) -> str:
    """SHA-256 of a value's canonical JSON, 32 hex digits."""
    text = json.dumps(msgspec.to_builtins(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
