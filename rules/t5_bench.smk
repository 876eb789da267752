"""T5: schedules and baselines are checked and timed, results/logs/<m>/<r>/<set>.<solver>.csv and results/logs/<m>/baselines.csv;
so are the heat map, results/logs/heatmap/<resolution>.csv, and the orders themselves, results/logs/reorder_time.csv.
"""


rule bench:
    input:
        schedule=collect("results/schedules/{{m}}/{{r}}/{run}.json", run=BENCHED),
        blocks=collect("results/blocks/{{m}}/{{r}}/{t}.npz", t=CONFIG.tiles),
        graph="results/graphs/{m}/{r}.npz",
    output:
        csv=collect("results/logs/{{m}}/{{r}}/{run}.csv", run=BENCHED),
    log:
        "logs/bench/{m}/{r}.log",
    benchmark:
        "benchmarks/bench/{m}/{r}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: workflow.cores
    resources:
        timing=1,
    params:
        script=script("run_bench"),
        code=code("run_bench", "tilewright.bench"),
    shell:
        "python {params.script} --schedule {input.schedule} --output {output.csv} 2>&1 | tee {log}"
