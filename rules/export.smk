# A rule of its own, so that adding an exporter leaves train.parquet alone. `place` is a dataset or the mix (`train`).
rule export:
    input:
        unpack(export_inputs),
    output:
        data="results/{place}/exports/{exporter}/{side}.{suffix}",
        report="results/{place}/exports/{exporter}/{side}.{suffix}.report.json",
    log:
        "logs/export/{place}.{side}.{exporter}.{suffix}.log",
    benchmark:
        "logs/benchmarks/export/{place}.{side}.{exporter}.{suffix}.tsv"
    wildcard_constraints:
        exporter="[^/]+",
        place="|".join(map(re.escape, [*DATASETS, "train"])),
        side="train|eval",
        suffix="|".join(map(re.escape, EXPORT_SUFFIXES)),
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
        " --table {input.table:q}"
        " --prompts {input.prompts:q}"
        " --responses {input.responses:q}"
        " --out {output.data:q}"
        " --log {log:q}"
