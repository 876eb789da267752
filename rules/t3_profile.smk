"""T3: every tile of one reordered graph is timed on this device, results/profiling/<m>/<r>/<t>.json."""


rule profile:
    input:
        blocks=collect("results/blocks/{{m}}/{{r}}/{t}.npz", t=CONFIG.tiles),
        graph="results/graphs/{m}/{r}.npz",
    output:
        profile=collect("results/profiling/{{m}}/{{r}}/{t}.json", t=CONFIG.tiles),
    log:
        "logs/profile/{m}/{r}.log",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_graph),
    params:
        **parameters("run_bench", DEVICE_CODE, device=DEVICE, machine=MACHINE, split=SPLIT, seed=CONFIG.seed),
    shell:
        "TILEWRIGHT_CACHE=.snakemake/plans python {params.script} --profile_only --blocks {input.blocks:q} --graph {input.graph:q} {params.device} {params.split}"
        " --seed {params.seed} --output {output.profile:q} 2>&1 | tee {log:q}"
