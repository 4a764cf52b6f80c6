rule train:
    input:
        of_all("results/{dataset}/train.parquet"),
        "results/train/train.parquet",
        "results/train/eval.parquet",


rule train_of_dataset:
    input:
        prompts="results/{dataset}/prompts.jsonl.zst",
        responses="results/{dataset}/responses.jsonl.zst",
        verdicts="results/{dataset}/verdicts.parquet",
    output:
        "results/{dataset}/train.parquet",
    log:
        "logs/train/{dataset}.log",
    benchmark:
        "logs/benchmarks/train/{dataset}.tsv"
    conda:
        "../envs/data.yaml"
    resources:
        **CODE,
    params:
        settings=settings("train"),
        code=code("train"),
    shell:
        PROGRAM + "train.py"
        " --settings {params.settings:q}"
        " --prompts {input.prompts:q}"
        " --responses {input.responses:q}"
        " --verdicts {input.verdicts:q}"
        " --out {output:q}"
        " --log {log:q}"
