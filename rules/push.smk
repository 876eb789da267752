"""Push memories: a configuration for each example stream and engine, results/push/streams/<stream>.<engine>.json, and programs,
mapped, configured and run, results/push/<app>/<memory>/. A job that finds no configuration, or whose words differ from numpy's,
fails, and says why."""


rule configure:
    output:
        json="results/push/streams/{stream}.{engine}.json",
    log:
        "logs/push/{stream}.{engine}.log",
    wildcard_constraints:
        engine="|".join(configuring.ENGINES),
    conda:
        environment("cpu")
    threads: workflow.cores
    resources:
        timing=1,
        mem_mb=mem_mb(lambda wildcards: 1 << 20, LEAST_TIMED_MB),
        runtime=runtime(lambda wildcards: 1 << 20, LEAST_TIMED_MINUTES),
    params:
        **parameters("configure", configuring_modules, machine=HOST, arguments=configuring_arguments),
    shell:
        "python {params.script} {params.arguments} --engine {wildcards.engine} --output {output.json:q} 2>&1 | tee {log:q}"


rule push_map:
    output:
        mapped="results/push/{app}/{memory}/mapped.json",
    log:
        "logs/push/{app}.{memory}.map.log",
    wildcard_constraints:
        app="|".join(CONFIG.push.apps),
        memory="|".join(CONFIG.push.memories),
    # Of the three, one waits for the other: a long chain that begins late ends alone.
    priority: 1
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(lambda wildcards: 1 << 20),
        runtime=runtime(lambda wildcards: 1 << 20),
    params:
        **parameters("push_app", app_modules),
        folder=lambda wildcards, output: os.path.dirname(output[0]),
    shell:
        "python {params.script} --app {wildcards.app} --memory {wildcards.memory} --step map --output {params.folder}"
        " 2>&1 | tee {log:q}"


rule push_configure:
    input:
        "results/push/{app}/{memory}/mapped.json",
    output:
        config="results/push/{app}/{memory}/config.json",
    log:
        "logs/push/{app}.{memory}.configure.log",
    wildcard_constraints:
        app="|".join(CONFIG.push.apps),
        memory="|".join(CONFIG.push.memories),
    priority: 1
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(lambda wildcards: 1 << 20),
        runtime=runtime(lambda wildcards: 1 << 20),
    params:
        **parameters("push_app", app_modules),
        folder=lambda wildcards, output: os.path.dirname(output[0]),
    shell:
        "python {params.script} --app {wildcards.app} --memory {wildcards.memory} --step configure --output {params.folder}"
        " 2>&1 | tee {log:q}"


rule push_run:
    input:
        "results/push/{app}/{memory}/mapped.json",
        "results/push/{app}/{memory}/config.json",
    output:
        rows="results/push/{app}/{memory}/run.csv",
    log:
        "logs/push/{app}.{memory}.run.log",
    wildcard_constraints:
        app="|".join(CONFIG.push.apps),
        memory="|".join(CONFIG.push.memories),
    priority: 1
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(lambda wildcards: 1 << 20),
        runtime=runtime(lambda wildcards: 1 << 20),
    params:
        **parameters("push_app", app_modules, rtl="" if CONFIG.push.rtl else "--no-rtl"),
        folder=lambda wildcards, output: os.path.dirname(output[0]),
    shell:
        "python {params.script} --app {wildcards.app} --memory {wildcards.memory} --step run {params.rtl}"
        " --output {params.folder} 2>&1 | tee {log:q}"
