"""Weights of networks for segmentation, results/checkpoints/<network>.<recipe>.safetensors, with the losses of each step and with
how well the network labels scenes that it has not seen. On one GPU in minutes; nothing asks for it by default."""


rule train:
    input:
        start=trained_from,
    output:
        weights="results/checkpoints/{network}.{recipe}.safetensors",
        log="results/checkpoints/{network}.{recipe}.csv",
        scores="results/checkpoints/{network}.{recipe}.json",
    log:
        "logs/train/{network}.{recipe}.log",
    wildcard_constraints:
        network=r"segformer-b[0-5]-\d+(x\d+)?",
    conda:
        TIMED_ENV
    threads: THREADS
    resources:
        **asked(of_largest([])),
    params:
        **parameters(
            "train",
            [
                "tilewright_study.training.segmentation",
                "tilewright.networks.segformer",
                "tilewright_study.scenes.sources.scenes",
                *SCENES,
            ],
            arguments=training_arguments,
            compiled="--compiled" if EXCLUSIVE else "",
            device=CONFIG.device,
            seed=CONFIG.seed,
        ),
    shell:
        "python {params.script} --network {wildcards.network} --recipe {wildcards.recipe} {params.arguments}"
        " --device {params.device} {params.compiled} --seed {params.seed}"
        " --output {output.weights:q} --log {output.log:q} --scores {output.scores:q} 2>&1 | tee {log:q}"
