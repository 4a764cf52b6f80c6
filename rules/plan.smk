# The hours, from what the pilots saw.
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
