# Eyas loads this as a module: the rule is called hello_tables. `config` holds `options` and `datasets`.
rule tables:
    input:
        expand("results/{dataset}/train.parquet", dataset=config["datasets"]),
    output:
        "results/hello/tables.txt",
    log:
        "logs/hello/tables.log",
    params:
        greeting=config["options"]["greeting"],
    shell:
        "(echo {params.greeting:q} && wc -c {input:q}) > {output:q} 2> {log:q}"
