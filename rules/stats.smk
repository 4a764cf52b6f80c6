rule stats:
    input:
        of_all("results/{dataset}/stats.json"),


rule stats_of_dataset:
    input:
        prompts="results/{dataset}/prompts.json",
        outcomes="results/{dataset}/outcomes.jsonl.zst",
        verdicts="results/{dataset}/verdicts.parquet",
        train="results/{dataset}/train.parquet",
    output:
        "results/{dataset}/stats.json",
    log:
        "logs/stats/{dataset}.log",
    benchmark:
        "logs/benchmarks/stats/{dataset}.tsv"
    conda:
        "../envs/data.yaml"
    resources:
        **CODE,
    params:
        settings=settings("stats"),
        code=code("stats"),
    shell:
        PROGRAM + "stats.py"
        " --settings {params.settings:q}"
        " --prompts {input.prompts:q}"
        " --outcomes {input.outcomes:q}"
        " --verdicts {input.verdicts:q}"
        " --train {input.train:q}"
        " --out {output:q}"
        " --log {log:q}"
