"""T1: a workload's name becomes its attention graph, results/graphs/<m>.npz."""


rule graph:
    input:
        sources,
    output:
        graph="results/graphs/{m}.npz",
    log:
        "logs/graph/{m}.log",
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(of_graph),
        runtime=runtime(of_graph),
    params:
        **parameters("gen_adj", graph_modules, settings=stated(CONFIG.models, "m", sources)),
    shell:
        "python {params.script} --model {wildcards.m} {params.settings} --output {output.graph:q} 2>&1 | tee {log:q}"
