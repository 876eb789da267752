"""T5: schedules and baselines are checked and timed, results/logs/<m>/<r>/<set>.<solver>.csv and results/logs/<m>/baselines.csv;
so are the cases of all other experiments, results/logs/<experiment>/<case>.csv.

On a CPU, timed jobs run alone. What torch compiles for them is compiled before, in jobs side by side that list it in
results/compiled/; a timed job finds it in torch's cache, and compiles by itself what is not there.
"""


rule bench:
    input:
        schedule=collect("results/schedules/{{m}}/{{r}}/{run}.json", run=RUNS),
        blocks=collect("results/blocks/{{m}}/{{r}}/{t}.npz", t=CONFIG.tiles),
        profile=collect("results/profiling/{{m}}/{{r}}/{t}.json", t=CONFIG.tiles),
        graph="results/graphs/{m}/{r}.npz",
    output:
        csv=collect("results/logs/{{m}}/{{r}}/{run}.csv", run=RUNS),
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
        code=attention_code("run_bench", "study.stages.bench", experiments.member("attention").scheduled),
        device=CONFIG.device,
        effort=EFFORT,
        seed=CONFIG.seed,
    shell:
        "python {params.script} --schedule {input.schedule} --graph {input.graph} --blocks {input.blocks}"
        " --profile {input.profile} --device {params.device} {params.effort} --seed {params.seed}"
        " --output {output.csv} 2>&1 | tee {log}"


rule compile_baselines:
    input:
        graph=in_orders(CONFIG.attention.baseline_orders),
    output:
        names="results/compiled/{m}.txt",
    log:
        "logs/compile/{m}.log",
    benchmark:
        "logs/compile/{m}.tsv"
    conda:
        TIMED_ENV
    resources:
        mem_mb=mem_mb(of_graph, LEAST_TIMED_MB),
        runtime=runtime(of_graph),
    params:
        kept=f"{COMPILED} {TIMED_THREADS}",
        script=script("run_baselines"),
        code=attention_code("run_baselines", "study.stages.baselines", experiments.member("attention").compared),
        names=CONFIG.attention.baselines,
        device=DEVICE,
        seed=CONFIG.seed,
    shell:
        "{params.kept} python {params.script} --compile-only --baselines {params.names}"
        " --graph {input.graph} {params.device} --seed {params.seed} --output {output.names} 2>&1 | tee {log}"


rule baselines:
    input:
        compiled_baselines,
        graph=in_orders(CONFIG.attention.baseline_orders),
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
        kept=COMPILED,
        script=script("run_baselines"),
        code=attention_code("run_baselines", "study.stages.baselines", experiments.member("attention").compared),
        names=CONFIG.attention.baselines,
        device=DEVICE,
        dense=CONFIG.attention.max_dense_tokens,
        effort=EFFORT,
        seed=CONFIG.seed,
    shell:
        "{params.kept} python {params.script} --baselines {params.names}"
        " --graph {input.graph} {params.device} --max-dense-tokens {params.dense} {params.effort}"
        " --seed {params.seed} --output {output.csv} 2>&1 | tee {log}"


rule video_weights:
    output:
        weights="results/video/{case}.safetensors",
        losses="results/video/{case}.csv",
    log:
        "logs/video_weights/{case}.log",
    benchmark:
        "logs/video_weights/{case}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_weights),
    params:
        script=script("train_video"),
        code=code("train_video", "study.stages.train_video", "training.video", "networks.wan"),
        arguments=weights_arguments,
        seed=CONFIG.seed,
    shell:
        "python {params.script} {params.arguments} --seed {params.seed}"
        " --output {output.weights} --losses {output.losses} 2>&1 | tee {log}"


rule classifier:
    output:
        weights="results/classifiers/{network}.{seed}.safetensors",
        predictor="results/classifiers/{network}-dynamicvit.{seed}.safetensors",
        losses="results/classifiers/{network}.{seed}.csv",
    log:
        "logs/classifier/{network}.{seed}.log",
    benchmark:
        "logs/classifier/{network}.{seed}.tsv"
    wildcard_constraints:
        seed=r"\d+",
        network=r"deit-[a-z0-9-]*[0-9]",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_classifier),
    params:
        script=script("train_classifier"),
        code=code(
            *("train_classifier", "study.stages.train_classifier", "networks.deit", "scenes.sources.crops"),
            *("pruners.none", "pruners.dynamicvit"),
        ),
        arguments=classifier_arguments,
    shell:
        "python {params.script} {params.arguments}"
        " --output {output.weights} --predictor {output.predictor} --losses {output.losses} 2>&1 | tee {log}"


rule video_pictures:
    input:
        pictured_weights,
    output:
        pictures="results/logs/video/{case}.npz",
    log:
        "logs/video_pictures/{case}.log",
    benchmark:
        "logs/video_pictures/{case}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_weights),
    params:
        script=script("video_pictures"),
        code=code("video_pictures", "study.stages.video_pictures", "study.experiments._video"),
        arguments=pictures_arguments,
        device=CONFIG.device,
        seed=CONFIG.seed,
    shell:
        "TILEWRIGHT_CACHE=.snakemake/plans python {params.script} --case {wildcards.case} {params.arguments}"
        " --device {params.device} --seed {params.seed} --output {output.pictures} 2>&1 | tee {log}"


rule path_pictures:
    input:
        case_sources,
        csv="results/logs/{experiment}/{case}.csv",
    output:
        pictures="results/logs/{experiment}/{case}.npz",
    log:
        "logs/path_pictures/{experiment}/{case}.log",
    benchmark:
        "logs/path_pictures/{experiment}/{case}.tsv"
    wildcard_constraints:
        experiment="paths",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_case),
    params:
        script=script("path_pictures"),
        code=code("path_pictures", "study.stages.path_pictures", "networks.segformer", "scenes.sources.scenes"),
        arguments=path_pictures_arguments,
        device=CONFIG.device,
    shell:
        "python {params.script} --case {wildcards.case} --table {input.csv} {params.arguments}"
        " --device {params.device} --output {output.pictures} 2>&1 | tee {log}"


rule compile_experiment:
    input:
        case_sources,
    output:
        names="results/compiled/{experiment}/{case}.txt",
    log:
        "logs/compile/{experiment}/{case}.log",
    benchmark:
        "logs/compile/{experiment}/{case}.tsv"
    conda:
        TIMED_ENV
    resources:
        mem_mb=mem_mb(of_case, LEAST_TIMED_MB),
        runtime=runtime(of_case),
    params:
        kept=f"{COMPILED} {TIMED_THREADS}",
        script=script("run_experiment"),
        code=experiment_code,
        arguments=experiment_arguments,
    shell:
        "{params.kept} python {params.script} --compile-only --experiment {wildcards.experiment} --case {wildcards.case}"
        " {params.arguments} --output {output.names} 2>&1 | tee {log}"


rule experiment:
    input:
        compiled_case,
        case_sources,
    output:
        csv="results/logs/{experiment}/{case}.csv",
    log:
        "logs/{experiment}/{case}.log",
    benchmark:
        "logs/{experiment}/{case}.tsv"
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_case),
    params:
        kept=COMPILED,
        script=script("run_experiment"),
        code=experiment_code,
        arguments=experiment_arguments,
    shell:
        "{params.kept} TILEWRIGHT_CACHE=.snakemake/plans python {params.script}"
        " --experiment {wildcards.experiment} --case {wildcards.case} {params.arguments}"
        " --output {output.csv} 2>&1 | tee {log}"


use rule experiment as experiment_on_host with:
    wildcard_constraints:
        experiment="|".join(ON_HOST),
    conda:
        "../envs/cpu.yaml"
    threads: workflow.cores
    resources:
        timing=1,
        mem_mb=mem_mb(of_case, LEAST_TIMED_MB),
        runtime=runtime(of_case, LEAST_TIMED_MINUTES),


use rule experiment as experiment_untimed with:
    wildcard_constraints:
        experiment="|".join(UNTIMED),
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=mem_mb(of_case),
        runtime=runtime(of_case),
