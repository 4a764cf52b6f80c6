# A rule of its own, so that adding an exporter leaves train.parquet alone. `place` is a dataset or the mix (`train`).
rule export:
    input:
        "results/{place}/{side}.parquet",
    output:
        "results/{place}/exports/{exporter}/{side}.{suffix}",
    log:
        "logs/export/{place}.{side}.{exporter}.{suffix}.log",
    benchmark:
        "logs/benchmarks/export/{place}.{side}.{exporter}.{suffix}.tsv"
    wildcard_constraints:
        exporter="[^/]+",
        place="|".join(map(re.escape, [*DATASETS, "train"])),
        side="train|eval",
        suffix="[^/]+",
    conda:
        "../envs/data.yaml"
    resources:
        **CODE,
    params:
        settings=lambda wildcards: canonical(STAGES.export(wildcards.exporter)),
        code=lambda wildcards: code_digest(
            STAGES, "export", exporter=wildcards.exporter
        ),
    shell:
        PROGRAM + "export.py"
        " --settings {params.settings:q}"
        " --plugins {resources.plugins:q}"
        " --table {input:q}"
        " --out {output:q}"
        " --log {log:q}"
