"""Tilewright's study, from attention patterns to figures. One rule file per stage; see README.md and config.yaml."""

from snakemake.utils import min_version

min_version("9.19")

# This checkout, also where workflow/Snakefile or a workflow of one's own includes it.
ROOT = str(workflow.current_basedir)


configfile: f"{ROOT}/config.yaml"


report: "workflow/report/workflow.rst"


include: "rules/common.smk"
include: "rules/t1_graph.smk"
include: "rules/t2_blocks.smk"
include: "rules/t3_profile.smk"
include: "rules/t4_schedule.smk"
include: "rules/t5_bench.smk"
include: "rules/t6_figures.smk"
include: "rules/train.smk"
include: "rules/push.smk"


localrules:
    all,


rule all:
    default_target: True
    input:
        everything,
