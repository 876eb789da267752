"""T5: schedules and baselines are checked and timed, results/logs/<m>/<r>/<set>.<solver>.csv and results/logs/<m>/baselines.csv;
so are whole networks, results/logs/networks/<network>.csv, packed attention, results/logs/ragged/<heads>x<head_dim>.csv, pruned
networks, results/logs/pruned/<network>.csv, the heat map, results/logs/heatmap/<resolution>.csv, and the orders
themselves, results/logs/reorder_time.csv.
"""


rule bench:
    input:
        schedule=collect("results/schedules/{{m}}/{{r}}/{run}.json", run=BENCHED),
        blocks=collect("results/blocks/{{m}}/{{r}}/{t}.npz", t=CONFIG.tiles),
        profile=collect("results/profiling/{{m}}/{{r}}/{t}.json", t=CONFIG.tiles),
        graph="results/graphs/{m}/{r}.npz",
    output:
        csv=collect("results/logs/{{m}}/{{r}}/{run}.csv", run=BENCHED),
    log:
        "logs/bench/{m}/{r}.log",
    benchmark:
        "logs/bench/{m}/{r}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_graph),
    params:
        script=script("run_bench"),
        code=code("run_bench", "study.bench", *DEVICE_CODE),
        device=CONFIG.device,
        effort=EFFORT,
    shell:
        "python {params.script} --schedule {input.schedule} --graph {input.graph}"
        " --device {params.device} {params.effort}"
        " --output {output.csv} 2>&1 | tee {log}"


rule baselines:
    input:
        graph=in_orders(CONFIG.bench.baseline_orders),
    output:
        csv="results/logs/{m}/baselines.csv",
    log:
        "logs/baselines/{m}.log",
    benchmark:
        "logs/baselines/{m}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_graph),
    params:
        script=script("run_bench"),
        code=code("run_bench", "study.bench", FACTS, *(f"baselines.sparse.{name}" for name in CONFIG.bench.baselines)),
        names=CONFIG.bench.baselines,
        device=DEVICE,
        dense=CONFIG.bench.max_dense_tokens,
        effort=EFFORT,
    shell:
        "TORCHINDUCTOR_CACHE_DIR=.snakemake/inductor python {params.script} --baselines {params.names}"
        " --graph {input.graph} {params.device} --max-dense-tokens {params.dense} {params.effort}"
        " --output {output.csv} 2>&1 | tee {log}"


rule network:
    output:
        csv="results/logs/networks/{network}.csv",
    log:
        "logs/networks/{network}.log",
    benchmark:
        "logs/networks/{network}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_network),
    params:
        script=script("run_network"),
        code=network_code,
        attention=BATCHES,
        device=DEVICE,
        effort=effort(CONFIG.networks.max_seconds),
    shell:
        "TORCHINDUCTOR_CACHE_DIR=.snakemake/inductor TILEWRIGHT_CACHE=.snakemake/plans"
        " python {params.script} --network {wildcards.network} --attention {params.attention} {params.device}"
        " {params.effort} --output {output.csv} 2>&1 | tee {log}"


rule ragged:
    output:
        csv="results/logs/ragged/{heads}x{head_dim}.csv",
    log:
        "logs/ragged/{heads}x{head_dim}.log",
    benchmark:
        "logs/ragged/{heads}x{head_dim}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_ragged),
    params:
        script=script("run_ragged"),
        code=code(
            "run_ragged",
            "study.bench.ragged",
            FACTS,
            *PACKED,
            *(f"baselines.packed.{name}" for name in packed_baselines.NAMES),
        ),
        lengths=[f"{low}-{high}" for low, high in CONFIG.ragged.lengths],
        attention=sized(CONFIG.ragged.attention),
        device=DEVICE,
        effort=effort(CONFIG.ragged.max_seconds),
    shell:
        "TORCHINDUCTOR_CACHE_DIR=.snakemake/inductor python {params.script} --heads {wildcards.heads}"
        " --head-dim {wildcards.head_dim} --lengths {params.lengths} --attention {params.attention} {params.device}"
        " {params.effort} --output {output.csv} 2>&1 | tee {log}"


rule pruned:
    output:
        csv="results/logs/pruned/{network}.csv",
    log:
        "logs/pruned/{network}.log",
    benchmark:
        "logs/pruned/{network}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_network),
    params:
        script=script("run_pruned"),
        code=code("run_pruned", "study.bench.pruned", *PRUNED_CODE),
        settings=settings,
        attention=CONFIG.pruned.attention,
        modes=modes,
        device=DEVICE,
        effort=effort(CONFIG.pruned.max_seconds),
    shell:
        "TORCHINDUCTOR_CACHE_DIR=.snakemake/inductor python {params.script} --network {wildcards.network}"
        " --setting {params.settings} --attention {params.attention} --modes {params.modes} {params.device}"
        " {params.effort} --output {output.csv} 2>&1 | tee {log}"


rule heatmap:
    output:
        csv="results/logs/heatmap/{resolution}.csv",
    log:
        "logs/heatmap/{resolution}.log",
    benchmark:
        "logs/heatmap/{resolution}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_heatmap),
    params:
        script=script("run_bench"),
        code=code(
            "run_bench",
            "study.bench.sweeps",
            "models.dynamicvit",
            f"reorder.{CONFIG.heatmap.order}",
            *solvers(CONFIG.heatmap.solver),
            *(f"baselines.sparse.{name}" for name in sparse_baselines.DENSE),
            *DEVICE_CODE,
        ),
        device=DEVICE,
        settings=CONFIG.heatmap,
        tiles=CONFIG.tiles,
        split=SPLIT,
        effort=EFFORT,
    shell:
        "python {params.script} --heatmap {wildcards.resolution} --patches {params.settings.patches}"
        " --orders {params.settings.order} --tiles {params.tiles} --solver {params.settings.solver} {params.split}"
        " --max-dense-tokens {params.settings.max_tokens} {params.device} {params.effort}"
        " --output {output.csv} 2>&1 | tee {log}"


rule reorder_times:
    output:
        csv="results/logs/reorder_time.csv",
    log:
        "logs/reorder_times.log",
    benchmark:
        "logs/reorder_times.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: workflow.cores
    resources:
        timing=1,
        mem_mb=mem_mb(of_largest(CONFIG.reorder_times.workloads)),
        runtime=runtime(of_largest(CONFIG.reorder_times.workloads), LEAST_TIMED_MINUTES),
    params:
        script=script("run_bench"),
        code=code(
            "run_bench",
            "study.bench.sweeps",
            *families(CONFIG.reorder_times.workloads),
            *(f"reorder.{name}" for name in CONFIG.orders),
        ),
        workloads=CONFIG.reorder_times.workloads,
        orders=CONFIG.orders,
    shell:
        "python {params.script} --reorder-times {params.workloads} --orders {params.orders}"
        " --output {output.csv} 2>&1 | tee {log}"
