# `snakemake serve` holds a server until interrupted: in a second terminal, or as a GPU job. No outputs, so no lock; and no
# benchmark, which counts as one: a second `serve` would have nothing to do.
rule serve:
    log:
        "logs/serve.log",
    conda:
        "../envs/generate.yaml"
    resources:
        **CODE,
        access=canonical(STAGES.access()),
    shell:
        PROGRAM + "serve.py" " --access {resources.access:q}" " --log {log:q}"
