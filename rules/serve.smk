# `snakemake serve` holds a server until interrupted: in a second terminal, or as a GPU job. No outputs, so no lock.
rule serve:
    log:
        "logs/serve.log",
    benchmark:
        "logs/benchmarks/serve.tsv"
    conda:
        "../envs/generate.yaml"
    resources:
        **CODE,
        access=canonical(STAGES.access()),
    shell:
        PROGRAM + "serve.py" " --access {resources.access:q}" " --log {log:q}"
