"""T6: figures/<figure>.{svg,png,pdf} and results/tables/<table>.{csv,md}, each from the files that it names itself, with a
.json that names its origin. results/report.html shows them all."""


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
        origin="figures/{figure}.json",
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
        code=figure_code,
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
        origin="results/tables/{table}.json",
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
        code=code("table", "study.tables.{table}", "study.tables._origin"),
        caption=caption("table"),
    shell:
        "python {params.script} --table {wildcards.table} --inputs {input} --outputs {output} 2>&1 | tee {log}"


rule report:
    input:
        figures=collect("figures/{figure}.svg", figure=FIGURES),
        tables=collect("results/tables/{table}.csv", table=TABLES),
        origins=[
            *collect("figures/{figure}.json", figure=FIGURES),
            *collect("results/tables/{table}.json", table=TABLES),
        ],
        explored=page.explored(CONFIG),
        recorded=map(here, page.recorded(CONFIG)),
        captions=[here(f"workflow/report/captions/{name}.rst") for name in dict.fromkeys((*FIGURES, *TABLES))],
    output:
        page="results/report.html",
    log:
        "logs/report.log",
    benchmark:
        "logs/report.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        script=script("make_report"),
        code=code("make_report", "study.report.page", *[f"study.tables.{table}" for table in TABLES]),
        assets=[provenance.sha256_file(path)[:8] for path in page.ASSETS],
    shell:
        "python {params.script} --figures {input.figures} --tables {input.tables} --explored {input.explored}"
        " --captions {input.captions} --recorded {input.recorded} --output {output.page} 2>&1 | tee {log}"
