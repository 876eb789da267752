"""T2: a graph is put in a new order, results/graphs/<m>/<r>.npz, and covered by blocks, results/blocks/<m>/<r>/<t>.npz. One job writes
the blocks of all tiles that are profiled; those of another tile, which a figure shows, have a job of their own."""


rule reorder:
    input:
        graph="results/graphs/{m}.npz",
    output:
        graph="results/graphs/{m}/{r}.npz",
    log:
        "logs/reorder/{m}/{r}.log",
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(of_graph),
        runtime=runtime(of_graph),
    params:
        **parameters(
            "reorder",
            lambda wildcards: [f"tilewright.attention.reorder.{wildcards.r}"],
            settings=stated(CONFIG.reorder, "r"),
        ),
    shell:
        # In a process of its own from the start: the graph states the most memory that it had.
        "command python {params.script} --method {wildcards.r} {params.settings} --input {input.graph:q} --output {output.graph:q} 2>&1 | tee {log:q}"


rule blocks:
    input:
        graph="results/graphs/{m}/{r}.npz",
    output:
        blocks=collect("results/blocks/{{m}}/{{r}}/{t}.npz", t=CONFIG.tiles),
    log:
        "logs/blocks/{m}/{r}.log",
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(of_graph),
        runtime=runtime(of_graph),
    params:
        **parameters("extract_blocks", [], region_rows=CONFIG.region_rows, tiles=list(CONFIG.tiles)),
    shell:
        "python {params.script} --input {input.graph:q} --tile {params.tiles}"
        " --region-rows {params.region_rows} --output {output.blocks:q} 2>&1 | tee {log:q}"


ruleorder: blocks > blocks_of_tile


use rule blocks as blocks_of_tile with:
    output:
        blocks="results/blocks/{m}/{r}/{t}.npz",
    log:
        "logs/blocks/{m}/{r}/{t}.log",
    params:
        **parameters("extract_blocks", [], region_rows=CONFIG.region_rows, tiles=lambda wildcards: wildcards.t),
