rule mix:
    input:
        of_all("results/{dataset}/train.parquet"),
    output:
        train="results/train/train.parquet",
        eval="results/train/eval.parquet",
        report="results/train/mix.json",
    log:
        "logs/mix.log",
    benchmark:
        "logs/benchmarks/mix.tsv"
    conda:
        "../envs/data.yaml"
    resources:
        **CODE,
    params:
        settings=settings("mix"),
        code=code("mix"),
    shell:
        PROGRAM + "mix.py"
        " --settings {params.settings:q}"
        " --tables {input:q}"
        " --train {output.train:q}"
        " --eval {output.eval:q}"
        " --report {output.report:q}"
        " --log {log:q}"
