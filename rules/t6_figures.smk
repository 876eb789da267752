"""T6: figures/<figure>.{svg,png,pdf} and results/tables/<table>.{csv,md}, each from the files that it names itself, with a
.json that names its origin. results/report.html shows them all, and ro-crate-metadata.json says what made each file."""


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
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(of_largest(DRAWN)),
        runtime=runtime(of_largest(DRAWN)),
    params:
        **parameters(
            "draw",
            shown_modules(figures, "figure"),
            shipped={"shipped": shipped(figures, "figure")},
            caption=caption("figure"),
        ),
    shell:
        "python {params.script} --figure {wildcards.figure} --inputs {input:q} {params.shipped} --outputs {output:q} 2>&1 | tee {log:q}"


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
    conda:
        environment("cpu")
    resources:
        mem_mb=mem_mb(of_largest(CONFIG.workloads)),
        runtime=runtime(of_largest(CONFIG.workloads)),
    params:
        **parameters(
            "table",
            shown_modules(tables, "table"),
            shipped={"shipped": shipped(tables, "table")},
            caption=caption("table"),
        ),
    shell:
        "python {params.script} --table {wildcards.table} --inputs {input:q} {params.shipped} --outputs {output:q} 2>&1 | tee {log:q}"


rule report:
    input:
        figures=collect("figures/{figure}.svg", figure=FIGURES),
        tables=collect("results/tables/{table}.csv", table=TABLES),
        origins=[
            *collect("figures/{figure}.json", figure=FIGURES),
            *collect("results/tables/{table}.json", table=TABLES),
        ],
        explored=page.explored(CONFIG),
    output:
        page="results/report.html",
    log:
        "logs/report.log",
    conda:
        environment("cpu")
    params:
        **parameters(
            "make_report",
            [
                DEVICE_CODE[0],
                *(
                    module
                    for of, names in ((figures, FIGURES), (tables, TABLES))
                    for name in names
                    for module in of.modules(name)
                ),
            ],
            shipped={"recorded": lambda wildcards: page.recorded(CONFIG)},
            captions=captions,
        ),
    shell:
        "python {params.script} --figures {input.figures:q} --tables {input.tables:q} --explored {input.explored:q}"
        " --recorded {params.recorded} --output {output.page:q} 2>&1 | tee {log:q}"


rule crate:
    input:
        everything,
    output:
        "ro-crate-metadata.json",
    log:
        "logs/crate.log",
    conda:
        environment("cpu")
    params:
        **parameters("make_crate", []),
    shell:
        "python {params.script} --output {output:q} 2>&1 | tee {log:q}"
