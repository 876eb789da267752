"""T4: a solver gives each region a tile and a round, results/schedules/<m>/<r>/<set>.<solver>.json."""


rule schedule:
    input:
        blocks=for_tiles("results/blocks/{m}/{r}/{tile}.npz"),
        profile=for_tiles("results/profiling/{m}/{r}/{tile}.json"),
    output:
        schedule="results/schedules/{m}/{r}/{set}.{solver}.json",
    log:
        "logs/schedule/{m}/{r}/{set}.{solver}.log",
    benchmark:
        "logs/schedule/{m}/{r}/{set}.{solver}.tsv"
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(of_graph),
        runtime=runtime(of_graph, LEAST_MINUTES + CONFIG.schedule.time_limit_s / 60),
    params:
        **parameters(
            "solve_ilp",
            schedule_modules,
            objective=CONFIG.schedule.objective,
            time_limit_s=CONFIG.schedule.time_limit_s,
            gap=CONFIG.schedule.gap,
            rounds=unless_open("--rounds", CONFIG.schedule.rounds),
            kinds=unless_open("--max-tile-kinds", CONFIG.schedule.max_tile_kinds),
            seed=CONFIG.seed,
        ),
    shell:
        "python {params.script} --blocks {input.blocks:q} --profile {input.profile:q} --solver {wildcards.solver}"
        " --objective {params.objective} --time-limit {params.time_limit_s} --gap {params.gap}"
        " {params.rounds} {params.kinds} --seed {params.seed}"
        " --threads {threads} --output {output.schedule:q} 2>&1 | tee {log:q}"
