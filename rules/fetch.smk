# `snakemake fetch` brings everything that a run needs from the hub: on a cluster, where there is a network.
rule fetch:
    input:
        list(ON_THE_HUB),


# The files themselves are no output: Snakemake would delete a large data set when the job fails or reruns.
rule fetch_from_hub:
    output:
        "data/hub/{thing}manifest.json",
    log:
        "logs/fetch/{thing}fetch.log",
    benchmark:
        "logs/benchmarks/fetch/{thing}fetch.tsv"
    wildcard_constraints:
        thing="(models/.+/|datasets/.+[.])",
    conda:
        "../envs/generate.yaml"
    resources:
        **CODE,
        key=hub_key,
    params:
        name=hub_name,
        code=hub_code,
    shell:
        PROGRAM + "fetch.py"
        " --reference {params.name:q}"
        " --key {resources.key:q}"
        " {params.code}"
        " --log {log:q}"
