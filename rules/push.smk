"""Push memories: a configuration for each example stream and engine, results/push/streams/<stream>.<engine>.json, and programs,
mapped, configured and run, results/push/<app>/<memory>/. A job that finds no configuration, or whose words differ from numpy's,
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


rule push_map:
    output:
        program="results/push/{app}/{memory}/program.json",
        mapped="results/push/{app}/{memory}/mapped.json",
    log:
        "logs/push/{app}.{memory}.map.log",
    benchmark:
        "logs/push/{app}.{memory}.map.tsv"
    wildcard_constraints:
        app="|".join(CONFIG.push.apps),
        memory="|".join(CONFIG.push.memories),
    conda:
        "../envs/cpu.yaml"
    resources:
        mem_mb=mem_mb(lambda wildcards: 1 << 20),
        runtime=runtime(lambda wildcards: 1 << 20),
    params:
        script=script("push_app"),
        code=app_code,
        folder=lambda wildcards, output: os.path.dirname(output[0]),
    shell:
        "python {params.script} --app {wildcards.app} --memory {wildcards.memory} --step map --output {params.folder}"
        " 2>&1 | tee {log}"


rule push_configure:
    input:
        "results/push/{app}/{memory}/program.json",
        "results/push/{app}/{memory}/mapped.json",
    output:
        config="results/push/{app}/{memory}/config.json",
    log:
        "logs/push/{app}.{memory}.configure.log",
    benchmark:
        "logs/push/{app}.{memory}.configure.tsv"
    wildcard_constraints:
        app="|".join(CONFIG.push.apps),
        memory="|".join(CONFIG.push.memories),
    conda:
        "../envs/cpu.yaml"
    resources:
        mem_mb=mem_mb(lambda wildcards: 1 << 20),
        runtime=runtime(lambda wildcards: 1 << 20),
    params:
        script=script("push_app"),
        code=app_code,
        folder=lambda wildcards, output: os.path.dirname(output[0]),
    shell:
        "python {params.script} --app {wildcards.app} --memory {wildcards.memory} --step configure --output {params.folder}"
        " 2>&1 | tee {log}"


rule push_run:
    input:
        "results/push/{app}/{memory}/mapped.json",
        "results/push/{app}/{memory}/config.json",
    output:
        rows="results/push/{app}/{memory}/run.csv",
    log:
        "logs/push/{app}.{memory}.run.log",
    benchmark:
        "logs/push/{app}.{memory}.run.tsv"
    wildcard_constraints:
        app="|".join(CONFIG.push.apps),
        memory="|".join(CONFIG.push.memories),
    conda:
        "../envs/cpu.yaml"
    resources:
        mem_mb=mem_mb(lambda wildcards: 1 << 20),
        runtime=runtime(lambda wildcards: 1 << 20),
    params:
        script=script("push_app"),
        code=app_code,
        folder=lambda wildcards, output: os.path.dirname(output[0]),
        rtl="" if CONFIG.push.rtl else "--model-only",
    shell:
        "python {params.script} --app {wildcards.app} --memory {wildcards.memory} --step run {params.rtl}"
        " --output {params.folder} 2>&1 | tee {log}"
