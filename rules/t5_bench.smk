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
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_graph),
    params:
        **parameters(
            "run_bench",
            attention_modules(experiments.member("attention").scheduled),
            device=CONFIG.device,
            machine=MACHINE,
            effort=EFFORT,
            seed=CONFIG.seed,
        ),
    shell:
        "python {params.script} --schedule {input.schedule:q} --graph {input.graph:q} --blocks {input.blocks:q}"
        " --profile {input.profile:q} --device {params.device} {params.effort} --seed {params.seed}"
        " --output {output.csv:q} 2>&1 | tee {log:q}"


rule compile_baselines:
    input:
        graph=in_orders(CONFIG.attention.baseline_orders),
    output:
        names="results/compiled/{m}.txt",
    log:
        "logs/compile/{m}.log",
    conda:
        TIMED_ENV
    resources:
        mem_mb=mem_mb(of_graph, LEAST_TIMED_MB),
        runtime=runtime(of_graph),
    params:
        **parameters(
            "run_baselines",
            attention_modules(experiments.member("attention").compared),
            kept=f"{COMPILED} {TIMED_THREADS}",
            names=list(CONFIG.attention.baselines),
            forms=baseline_forms,
            device=DEVICE,
            machine=MACHINE,
            seed=CONFIG.seed,
        ),
    shell:
        "{params.kept} python {params.script} --compile-only --baselines {params.names} {params.forms}"
        " --graph {input.graph:q} {params.device} --seed {params.seed} --output {output.names:q} 2>&1 | tee {log:q}"


rule baselines:
    input:
        compiled_baselines,
        graph=in_orders(CONFIG.attention.baseline_orders),
        schedule=headline_plan,
    output:
        csv="results/logs/{m}/baselines.csv",
    log:
        "logs/baselines/{m}.log",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_graph),
    params:
        **parameters(
            "run_baselines",
            attention_modules(experiments.member("attention").compared),
            kept=COMPILED,
            names=list(CONFIG.attention.baselines),
            beside="--schedule" if experiments.member("attention").beside(CONFIG) else "",
            forms=baseline_forms,
            device=DEVICE,
            machine=MACHINE,
            dense=CONFIG.attention.max_dense_tokens,
            effort=EFFORT,
            seed=CONFIG.seed,
        ),
    shell:
        "{params.kept} python {params.script} --baselines {params.names} {params.forms}"
        " --graph {input.graph:q} {params.beside} {input.schedule:q} {params.device} --max-dense-tokens {params.dense} {params.effort}"
        " --seed {params.seed} --output {output.csv:q} 2>&1 | tee {log:q}"


rule video_weights:
    output:
        weights="results/video/{case}.safetensors",
        losses="results/video/{case}.csv",
    log:
        "logs/video_weights/{case}.log",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_weights),
    params:
        **parameters(
            "train_video",
            [
                "tilewright_study.training.video",
                "tilewright.networks.wan",
                "tilewright.networks.video_attentions.dense",
                *SCENES,
            ],
            arguments=weights_arguments,
            seed=CONFIG.seed,
        ),
    shell:
        "python {params.script} {params.arguments} --seed {params.seed}"
        " --output {output.weights:q} --losses {output.losses:q} 2>&1 | tee {log:q}"


rule classifier:
    output:
        weights="results/classifiers/{network}.{seed}.safetensors",
        predictor="results/classifiers/{network}-dynamicvit.{seed}.safetensors",
        losses="results/classifiers/{network}.{seed}.csv",
    log:
        "logs/classifier/{network}.{seed}.log",
    wildcard_constraints:
        seed=r"\d+",
        network=r"deit-[a-z0-9-]*[0-9]",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_classifier),
    params:
        **parameters("train_classifier", classifier_modules, arguments=classifier_arguments),
    shell:
        "python {params.script} {params.arguments}"
        " --output {output.weights:q} --predictor {output.predictor:q} --losses {output.losses:q} 2>&1 | tee {log:q}"


rule video_pictures:
    input:
        pictured_weights,
    output:
        pictures="results/logs/video/{case}.npz",
    log:
        "logs/video_pictures/{case}.log",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_weights),
    params:
        **parameters(
            "video_pictures",
            pictures_modules,
            arguments=pictures_arguments,
            device=CONFIG.device,
            seed=CONFIG.seed,
        ),
    shell:
        "TILEWRIGHT_CACHE=.snakemake/plans python {params.script} --case {wildcards.case} {params.arguments}"
        " --device {params.device} --seed {params.seed} --output {output.pictures:q} 2>&1 | tee {log:q}"


rule path_pictures:
    input:
        case_sources,
        csv="results/logs/{experiment}/{case}.csv",
    output:
        pictures="results/logs/{experiment}/{case}.npz",
    log:
        "logs/path_pictures/{experiment}/{case}.log",
    wildcard_constraints:
        experiment="paths",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_case),
    params:
        **parameters(
            "path_pictures",
            [
                "tilewright_study.experiments.paths",
                "tilewright.networks.segformer",
                "tilewright_study.scenes.sources.scenes",
                *SCENES,
            ],
            shipped={"weights": case_shipped},
            arguments=path_pictures_arguments,
            device=CONFIG.device,
        ),
    shell:
        "python {params.script} --case {wildcards.case} --table {input.csv:q} {params.arguments}"
        " --device {params.device} --output {output.pictures:q} 2>&1 | tee {log:q}"


rule compile_experiment:
    input:
        case_sources,
    output:
        names="results/compiled/{experiment}/{case}.txt",
    log:
        "logs/compile/{experiment}/{case}.log",
    conda:
        TIMED_ENV
    resources:
        mem_mb=mem_mb(of_case, LEAST_TIMED_MB),
        runtime=runtime(of_case),
    params:
        **parameters(
            "run_experiment",
            case_modules,
            shipped={"weights": case_shipped},
            kept=f"{COMPILED} {TIMED_THREADS}",
            machine=MACHINE,
            arguments=experiment_arguments,
        ),
    shell:
        "{params.kept} python {params.script} --compile-only --experiment {wildcards.experiment} --case {wildcards.case}"
        " {params.arguments} --output {output.names:q} 2>&1 | tee {log:q}"


rule experiment:
    input:
        compiled_case,
        case_sources,
    output:
        csv="results/logs/{experiment}/{case}.csv",
    log:
        "logs/{experiment}/{case}.log",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_case),
    params:
        **parameters(
            "run_experiment",
            case_modules,
            shipped={"weights": case_shipped},
            kept=COMPILED,
            python=case_python,
            machine=case_machine,
            arguments=experiment_arguments,
        ),
    shell:
        "{params.kept} TILEWRIGHT_CACHE=.snakemake/plans {params.python} {params.script}"
        " --experiment {wildcards.experiment} --case {wildcards.case} {params.arguments}"
        " --output {output.csv:q} 2>&1 | tee {log:q}"


use rule experiment as experiment_on_host with:
    wildcard_constraints:
        experiment="|".join(ON_HOST),
    conda:
        environment("cpu")
    threads: workflow.cores
    resources:
        timing=1,
        mem_mb=mem_mb(of_case, LEAST_TIMED_MB),
        runtime=runtime(of_case, LEAST_TIMED_MINUTES),


use rule experiment as experiment_untimed with:
    wildcard_constraints:
        experiment="|".join(UNTIMED),
    conda:
        environment("cpu")
    threads: 1
    resources:
        mem_mb=mem_mb(of_case),
        runtime=runtime(of_case),
