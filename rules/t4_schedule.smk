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
        "../envs/cpu.yaml"
    resources:
        mem_mb=mem_mb(of_graph),
        runtime=runtime(of_graph, LEAST_MINUTES + CONFIG.schedule.time_limit_s / 60),
    params:
        script=script("solve_ilp"),
        code=schedule_code,
        limits=CONFIG.schedule,
        rounds=unless_open("--rounds", CONFIG.schedule.rounds),
        kinds=unless_open("--max-tile-kinds", CONFIG.schedule.max_tile_kinds),
        seed=CONFIG.seed,
    shell:
        "python {params.script} --blocks {input.blocks} --profile {input.profile} --solver {wildcards.solver}"
        " --objective {params.limits.objective} --time-limit {params.limits.time_limit_s} --gap {params.limits.gap}"
        " {params.rounds} {params.kinds} --seed {params.seed}"
        " --threads {threads} --output {output.schedule} 2>&1 | tee {log}"
