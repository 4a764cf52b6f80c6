# For exporters that write a folder.
use rule export as export_folder with:
    output:
        data=directory("results/{place}/exports/{exporter}/{side}"),
        report="results/{place}/exports/{exporter}/{side}.report.json",
    log:
        "logs/export/{place}.{side}.{exporter}.log",
    benchmark:
        "logs/benchmarks/export/{place}.{side}.{exporter}.tsv"
