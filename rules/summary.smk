rule summary:
    input:
        of_all("results/{dataset}/prompts.jsonl.zst"),
        of_all("results/{dataset}/prompts.json"),
        of_all("results/{dataset}/responses.jsonl.zst"),
        of_all("results/{dataset}/outcomes.jsonl.zst"),
        of_all("results/{dataset}/timing.parquet"),
        of_all("results/{dataset}/servers.json"),
        of_all("results/{dataset}/verdicts.parquet"),
        of_all("results/{dataset}/stats.json"),
        of_all("results/{dataset}/train.parquet"),
        "results/train/train.parquet",
        "results/train/eval.parquet",
        "results/train/mix.json",
        exports=EXPORTS,
        export_reports=EXPORT_REPORTS,
        # Their digests are in the manifest.
        tokenizer=tokenizer_files,
    output:
        json="results/summary/summary.json",
        markdown="results/summary/summary.md",
        manifest="results/summary/manifest.json",
        page=report(
            "results/summary/report.html",
            caption="../docs/report.rst",
            category="Summary",
        ),
    log:
        "logs/summary.log",
    benchmark:
        "logs/benchmarks/summary.tsv"
    conda:
        "../envs/data.yaml"
    resources:
        **CODE,
    params:
        settings=settings("summary"),
        code=code("summary"),
        jobs=code_digests(STAGES),
    shell:
        PROGRAM + "summary.py"
        " --settings {params.settings:q}"
        " --code {params.jobs:q}"
        " --exports {input.exports:q}"
        " --out {output.json:q}"
        " --log {log:q}"
