# Prompts → responses → verdicts → stats → training set, for every dataset of the config. docs/config.md lists its keys.
from snakemake.utils import min_version

min_version("9.27")


include: "rules/checkout.smk"


# A config given by --configfile or by a parent workflow stands alone; without one, the shipped run is used.
if "datasets" not in config:
    check_yaml(Path("config.yaml"))

    configfile: "config.yaml"


include: "rules/common.smk"
include: "rules/fetch.smk"
include: "rules/prompts.smk"
include: "rules/generate.smk"
include: "rules/validate.smk"
include: "rules/stats.smk"
include: "rules/train.smk"
include: "rules/mix.smk"
include: "rules/export.smk"
include: "rules/export_folder.smk"
include: "rules/pilot.smk"
include: "rules/plan.smk"
include: "rules/summary.smk"
include: "rules/serve.smk"
include: "rules/plugins.smk"


localrules:
    all,
    fetch,
    fetch_from_hub,
    prompts,
    responses,
    verdicts,
    stats,
    train,


# Lists the per-dataset files too: Snakemake brings back a deleted intermediate only if a target names it.
rule all:
    default_target: True
    input:
        rules.prompts.input,
        rules.responses.input,
        rules.verdicts.input,
        rules.stats.input,
        rules.train.input,
        EXPORTS,
        EXPORT_REPORTS,
        rules.summary.output,
        [its.targets for its in PLUGIN_RULES.values()],


onstart:
    plan_stands_alone()
    leave_ctrl_c_to_serve(workflow.dag_settings.targets, local=workflow.local_exec)
    announce(Path("logs/generate"), planned_answers("generate"), DATASETS)
    announce(
        Path("logs/pilot"), planned_answers("pilot", CONFIG.plan.prompts), DATASETS
    )


onerror:
    print(
        report_failures(Path("logs"), EARLIER_LOGS, sys.argv, PLUGIN_RULES),
        file=sys.stderr,
    )
