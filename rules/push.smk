"""Push memories: a configuration for each example stream and engine, results/push/streams/<stream>.<engine>.json. A job that finds none
fails, and says why."""


rule configure:
    output:
        json="results/push/streams/{stream}.{engine}.json",
    log:
        "logs/push/{stream}.{engine}.log",
    benchmark:
        "logs/push/{stream}.{engine}.tsv"
    wildcard_constraints:
        engine="|".join(configuring.ENGINES),
    conda:
        "../envs/cpu.yaml"
    threads: workflow.cores
    resources:
        timing=1,
        mem_mb=mem_mb(lambda wildcards: 1 << 20, LEAST_TIMED_MB),
        runtime=runtime(lambda wildcards: 1 << 20, LEAST_TIMED_MINUTES),
    params:
        script=script("configure"),
        code=code("configure", "study.stages.configure", *experiments.member("configure").of_engines()),
        arguments=configuring_arguments,
    shell:
        "python {params.script} {params.arguments} --engine {wildcards.engine} --output {output.json} 2>&1 | tee {log}"
