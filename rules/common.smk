# Helpers of the rules. What decides a result goes into params (canonical settings, code digest); how and where it is
# computed goes into resources, which never make a result stale.
import json
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

ROOT = Path(str(workflow.current_basedir)).parent
sys.path.insert(0, str(ROOT))

from eyas.config import Stages, canonical, load, locate
from eyas.digest import code_digest, code_digests
from eyas.errors import EyasError
from eyas.failures import failed_jobs

try:
    CONFIG = load(config, workflow.configfiles, ROOT, check_files=True)
    STAGES = Stages(CONFIG, ROOT)
except EyasError as error:
    raise WorkflowError(str(error))

DATASETS = list(CONFIG.datasets)
# Trainers read the mix; a dataset's own export is made when it is asked for by path.
EXPORTS = [
    f"results/train/exports/{exporter}/{side}.{STAGES.suffix(exporter)}"
    for exporter in CONFIG.exports
    for side in ("train", "eval")
]


wildcard_constraints:
    dataset="|".join(map(re.escape, DATASETS)),


def settings(stage):
    """The part of the config that `stage` reads, as one canonical line."""

    def of(wildcards):
        return canonical(getattr(STAGES, stage)(*wildcards))

    return of


def code(stage):
    """A digest of the code that decides the output of `stage`."""

    def of(wildcards):
        return code_digest(STAGES, stage, getattr(wildcards, "dataset", None))

    return of


def source_files(wildcards):
    return [
        str(locate(file, ROOT)) for file in CONFIG.datasets[wildcards.dataset].files
    ]


def source_names(wildcards):
    return CONFIG.datasets[wildcards.dataset].files


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
PROGRAM = (
    "PYTHONPATH={resources.root:q} {resources.python:q} -P {resources.root:q}/scripts"
)


def failure_report():
    """Which jobs failed, why, where their logs are, and how to go on."""
    jobs = [f"  {log}: {reason}" for log, reason in failed_jobs(Path("logs"))]
    reasons = (
        ["These jobs failed:", *jobs]
        if jobs
        else ["A job failed before it could say why; see above."]
    )
    advice = (
        "Nothing finished is lost. To go on, mend that and run the same command again."
    )
    return "\n".join(["", *reasons, advice, ""])
