rule verdicts:
    input:
        of_all("results/{dataset}/verdicts.parquet"),


rule validate:
    input:
        "results/{dataset}/responses.jsonl.zst",
    output:
        "results/{dataset}/verdicts.parquet",
    log:
        "logs/validate/{dataset}.log",
    benchmark:
        "logs/benchmarks/validate/{dataset}.tsv"
    conda:
        "../envs/data.yaml"
    resources:
        **CODE,
    params:
        settings=settings("validate"),
        code=code("validate"),
    shell:
        PROGRAM + "validate.py"
        " --settings {params.settings:q}"
        " --plugins {resources.plugins:q}"
        " --responses {input:q}"
        " --out {output:q}"
        " --log {log:q}"
