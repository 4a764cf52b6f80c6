# Before the long run: a pilot of every dataset, all at once as the run will be, then the hours.
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
        " --out {output:q}"
        " --log {log:q}"


rule plan:
    input:
        of_all("results/plan/{dataset}.pilot.json"),
    output:
        json="results/plan/plan.json",
        markdown="results/plan/plan.md",
        page=report(
            "results/plan/plan.html", caption="../docs/plan.rst", category="Plan"
        ),
    log:
        "logs/plan.log",
    benchmark:
        "logs/benchmarks/plan.tsv"
    conda:
        "../envs/data.yaml"
    resources:
        **CODE,
    params:
        settings=settings("plan"),
        code=code("plan"),
    shell:
        PROGRAM + "plan.py"
        " --settings {params.settings:q}"
        " --pilots {input:q}"
        " --out {output.json:q}"
        " --log {log:q}"
