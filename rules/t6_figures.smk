"""T6: figures/<figure>.{svg,png,pdf} and results/tables/<table>.{csv,md}, each from the files that it names itself."""


rule figure:
    input:
        needs(figures, "figure"),
    output:
        svg=report(
            "figures/{figure}.svg",
            caption="../workflow/report/item.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        png="figures/{figure}.png",
        pdf="figures/{figure}.pdf",
    log:
        "logs/figure/{figure}.log",
    benchmark:
        "logs/figure/{figure}.tsv"
    conda:
        "../envs/cpu.yaml"
    resources:
        mem_mb=mem_mb(of_largest(DRAWN)),
        runtime=runtime(of_largest(DRAWN)),
    params:
        script=script("draw"),
        code=code("draw", "figures.{figure}", "figures.style"),
        caption=caption("figure"),
    shell:
        "python {params.script} --figure {wildcards.figure} --inputs {input} --outputs {output} 2>&1 | tee {log}"


rule table:
    input:
        needs(tables, "table"),
    output:
        csv=report(
            "results/tables/{table}.csv",
            caption="../workflow/report/item.rst",
            category="Tables",
            labels={"table": "{table}"},
        ),
        md="results/tables/{table}.md",
    log:
        "logs/table/{table}.log",
    benchmark:
        "logs/table/{table}.tsv"
    conda:
        "../envs/cpu.yaml"
    resources:
        mem_mb=mem_mb(of_largest(CONFIG.workloads)),
        runtime=runtime(of_largest(CONFIG.workloads)),
    params:
        script=script("table"),
        code=code("table", "tables.{table}"),
        caption=caption("table"),
    shell:
        "python {params.script} --table {wildcards.table} --inputs {input} --outputs {output} 2>&1 | tee {log}"
