# Before the long run: a pilot of every dataset, all at once as the run will be.
rule pilot:
    input:
        prompts="results/{dataset}/prompts.jsonl.zst",
        tokenizer=tokenizer_files,
    output:
        "results/plan/{dataset}.pilot.json",
    log:
        "logs/pilot/{dataset}.log",
    benchmark:
        "logs/benchmarks/pilot/{dataset}.tsv"
    conda:
        "../envs/generate.yaml"
    threads: 0
    resources:
        **CODE,
        access=access,
        journal=journal_folder,
        run=run_status,
        minutes=CONFIG.plan.minutes,
    params:
        settings=settings("pilot"),
        code=code("pilot"),
    shell:
        PROGRAM + "pilot.py"
        " --settings {params.settings:q}"
        " --access {resources.access:q}"
        " --minutes {resources.minutes}"
        " --prompts {input.prompts:q}"
        " --journal {resources.journal:q}"
        " --run {resources.run:q}"
        " --out {output:q}"
        " --log {log:q}"
