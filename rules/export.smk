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
        settings=settings("export"),
        code=code("export"),
    shell:
        PROGRAM + "export.py"
        " --settings {params.settings:q}"
        " --plugins {resources.plugins:q}"
        " --table {input:q}"
        " --out {output:q}"
        " --log {log:q}"
