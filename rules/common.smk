# Helpers of the rules. What decides a result goes into params (canonical settings, code digest); how and where it is
# computed goes into resources, which never make a result stale.
import json
import re

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from eyas.config import Stages, canonical, load, locate, watched
from eyas.digest import code_digest, code_digests
from eyas.failures import log_versions, report_failures
from eyas.progress import announce
from eyas.terminal import leave_ctrl_c_to_serve, shorten

# What a person at the terminal is told: this run's failures, not an earlier one's, and not drowned in settings.
EARLIER_LOGS = log_versions(Path("logs"))
shorten(logger)

try:
    CONFIG = load(config, workflow.configfiles, ROOT, check_files=True)
    STAGES = Stages(CONFIG, ROOT)
    PLUGIN_RULES = STAGES.plugin_rules()
except EyasError as error:
    sys.exit(f"eyas: error: {error}")

DATASETS = list(CONFIG.datasets)
# Trainers read the mix; a dataset's own export is made when it is asked for by path.
EXPORTS = [
    f"results/train/exports/{exporter}/{STAGES.export_name(exporter, side)}"
    for exporter in CONFIG.exports
    for side in ("train", "eval")
]
EXPORT_REPORTS = [f"{path}.report.json" for path in EXPORTS]
EXPORT_SUFFIXES = STAGES.export_suffixes()
ON_THE_HUB = STAGES.on_the_hub()


wildcard_constraints:
    dataset="|".join(map(re.escape, DATASETS)),


def subject(wildcards):
    """The dataset or exporter that a job is about; nothing for a job about all datasets."""
    return {
        name: wildcards[name]
        for name in ("dataset", "exporter")
        if name in wildcards.keys()
    }


def settings(stage):
    """The part of the config that `stage` reads, as one canonical line."""

    def of(wildcards):
        return canonical(getattr(STAGES, stage)(**subject(wildcards)))

    return of


def code(stage):
    """A digest of the code that decides the output of `stage`."""

    def of(wildcards):
        return code_digest(STAGES, stage, **subject(wildcards))

    return of


def access(wildcards):
    """How a dataset's job reaches the server, as one canonical line."""
    return canonical(STAGES.access(wildcards.dataset))


def source_files(wildcards):
    """The dataset's files; of those on the hub, the manifests."""
    return [
        str(watched(file, ROOT)) for file in CONFIG.datasets[wildcards.dataset].files
    ]


def source_places(wildcards):
    """Where the files lie, as a JSON list."""
    return json.dumps(
        [str(locate(file, ROOT)) for file in CONFIG.datasets[wildcards.dataset].files]
    )


def evaluation_files(wildcards):
    """The files of the evaluation sets that the dataset is held against, as source_files has them."""
    return [
        str(watched(file, ROOT))
        for held in STAGES.evaluation_sets(wildcards.dataset).values()
        for file in held.files
    ]


def evaluation_places(wildcards):
    """Where they lie, as a JSON object of lists by set."""
    return json.dumps(
        {
            name: [str(locate(file, ROOT)) for file in held.files]
            for name, held in STAGES.evaluation_sets(wildcards.dataset).items()
        }
    )


def source_names(wildcards):
    return CONFIG.datasets[wildcards.dataset].files


def tokenizer_files(wildcards):
    return STAGES.tokenizer_files()


def export_inputs(wildcards):
    """The training table; for exporters of text also the prompts behind it, and the responses that led on to later turns."""
    text = STAGES.exports_text(wildcards.exporter)
    behind = of_all("{dataset}") if wildcards.place == "train" else [wildcards.place]
    datasets = behind if text else []
    go_on = [name for name in datasets if CONFIG.datasets[name].turns == "all"]
    return {
        "table": f"results/{wildcards.place}/{wildcards.side}.parquet",
        "prompts": expand("results/{dataset}/prompts.jsonl.zst", dataset=datasets),
        "responses": expand("results/{dataset}/responses.jsonl.zst", dataset=go_on),
        "tokenizer": STAGES.tokenizer_files() if text else [],
    }


def hub_name(wildcards):
    return ON_THE_HUB[f"data/hub/{wildcards.thing}manifest.json"][0]


def hub_key(wildcards):
    return ON_THE_HUB[f"data/hub/{wildcards.thing}manifest.json"][1]


def hub_code(wildcards):
    """Whether the tokenizer's Python files are wanted; a dataset has none."""
    trusted = CONFIG.model.trust_remote_code and wildcards.thing.startswith("models/")
    return "--code" if trusted else ""


def journal_folder(wildcards):
    return f"{CONFIG.journal}/{wildcards.dataset}"


def run_status(wildcards):
    """Where the dataset's generation tells how far it is."""
    return f"logs/generate/{wildcards.dataset}.status.json"


def planned_answers(rule, most=None):
    """Rows at most (of all, or of the first `most`), and samples, of every dataset that `rule` of this run asks for; neither where
    only the prompts tell the turns."""
    jobs = [job for job in workflow.dag.needrun_jobs() if job.rule.name == rule]
    sections = {
        job.wildcards.dataset: CONFIG.datasets[job.wildcards.dataset] for job in jobs
    }
    return {
        name: (
            (min(filter(None, (section.rows, most)), default=None), section.samples)
            if section.turns == "first"
            else (None, 0)
        )
        for name, section in sections.items()
    }


def plan_stands_alone():
    """Refuses pilots and generation in one run, before anything starts.

    A pilot measures a server that has nothing else to do, and both write one journal.
    """
    if {"pilot", "generate"} <= {job.rule.name for job in workflow.dag.needrun_jobs()}:
        raise WorkflowError(
            "eyas: error: pilots measure the server's speed, so they cannot run beside generation; "
            "run `snakemake plan` first, then the rest in a call of its own (the pilot's answers are used there)"
        )


def of_all(pattern):
    """`pattern` for every dataset, in the order of the settings of mix and summary."""
    return expand(pattern, dataset=sorted(DATASETS))


# Programs run from the checkout, by the python of the rule's env if Snakemake deploys one, else by Snakemake's own.
CODE = {
    "root": str(ROOT),
    "python": (
        "python" if workflow.deployment_settings.deployment_method else sys.executable
    ),
    "plugins": json.dumps(list(STAGES.plugin_files)),
}
# `exec`: a signal to the job reaches the program and not a shell around it.
PROGRAM = (
    "exec env PYTHONPATH={resources.root:q}"
    " {resources.python:q} -P {resources.root:q}/scripts/"
)
