rule prompts:
    input:
        of_all("results/{dataset}/prompts.jsonl.zst"),


rule prompts_of_dataset:
    input:
        source_files,
        evaluation_files,
    output:
        prompts="results/{dataset}/prompts.jsonl.zst",
        report="results/{dataset}/prompts.json",
    log:
        "logs/prompts/{dataset}.log",
    benchmark:
        "logs/benchmarks/prompts/{dataset}.tsv"
    conda:
        "../envs/data.yaml"
    resources:
        **CODE,
        files=source_places,
        evaluation=evaluation_places,
    params:
        settings=settings("prompts"),
        names=source_names,
        code=code("prompts"),
    shell:
        PROGRAM + "prompts.py"
        " --settings {params.settings:q}"
        " --plugins {resources.plugins:q}"
        " --files {resources.files:q}"
        " --names {params.names:q}"
        " --evaluation {resources.evaluation:q}"
        " --out {output.prompts:q}"
        " --report {output.report:q}"
        " --log {log:q}"
