"""T4: a solver gives each region a tile and a round, results/schedules/<m>/<r>/<set>.<solver>.json. One job writes all schedules of
a graph in an order that the study runs or shows; another one has a job of its own."""


rule schedule:
    input:
        blocks=collect("results/blocks/{{m}}/{{r}}/{t}.npz", t=CONFIG.tiles),
        profile=collect("results/profiling/{{m}}/{{r}}/{t}.json", t=CONFIG.tiles),
    output:
        schedule=collect(
            "results/schedules/{{m}}/{{r}}/{run}.json", run=[f"{name}.{solver}" for name, solver in SOLVED]
        ),
    log:
        "logs/schedule/{m}/{r}.log",
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(of_graph),
        runtime=runtime(of_graph, LEAST_MINUTES + len(SOLVED) * CONFIG.schedule.time_limit_s / 60),
    params:
        **solving(lambda wildcards: SOLVED),
    shell:
        "python {params.script} --blocks {input.blocks:q} --profile {input.profile:q} --solver {params.solvers} --tiles {params.tiles}"
        " --objective {params.objective} --time-limit {params.time_limit_s} --gap {params.gap}"
        " {params.rounds} {params.kinds} --seed {params.seed}"
        " --threads {threads} --output {output.schedule:q} 2>&1 | tee {log:q}"


ruleorder: schedule > schedule_alone


use rule schedule as schedule_alone with:
    input:
        blocks=for_tiles("results/blocks/{m}/{r}/{tile}.npz"),
        profile=for_tiles("results/profiling/{m}/{r}/{tile}.json"),
    output:
        schedule="results/schedules/{m}/{r}/{set}.{solver}.json",
    log:
        "logs/schedule/{m}/{r}/{set}.{solver}.log",
    params:
        **solving(lambda wildcards: [(wildcards.set, wildcards.solver)]),
