rule responses:
    input:
        of_all("results/{dataset}/responses.jsonl.zst"),


# The journal is no output: Snakemake would delete it when the job fails or reruns, and with it the expensive part.
rule generate:
    input:
        prompts="results/{dataset}/prompts.jsonl.zst",
        # Its bytes are part of how the journal calls a rendering, so it is read even if nothing is asked.
        tokenizer=tokenizer_files,
    output:
        responses="results/{dataset}/responses.jsonl.zst",
        outcomes="results/{dataset}/outcomes.jsonl.zst",
        timing="results/{dataset}/timing.parquet",
        servers="results/{dataset}/servers.json",
    log:
        "logs/generate/{dataset}.log",
    benchmark:
        "logs/benchmarks/generate/{dataset}.tsv"
    conda:
        "../envs/generate.yaml"
    # An HTTP client needs no core: while one dataset drains its long tail, the next fills the server.
    threads: 0
    resources:
        **CODE,
        llm=1,
        access=access,
        journal=journal_folder,
    params:
        settings=settings("generate"),
        code=code("generate"),
    shell:
        PROGRAM + "generate.py"
        " --settings {params.settings:q}"
        " --access {resources.access:q}"
        " --prompts {input.prompts:q}"
        " --journal {resources.journal:q}"
        " --responses {output.responses:q}"
        " --outcomes {output.outcomes:q}"
        " --timing {output.timing:q}"
        " --servers {output.servers:q}"
        " --log {log:q}"
