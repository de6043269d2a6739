# in:  acceptance/, drafters/, gates/
# out: figures/*.svg, report.html, summary.tsv


rule plot:
    input:
        acceptance=ALL_MEASURED,
        metrics=of_drafters(f"{DRAFTER}/metrics.parquet", PLAN.trained()),
    output:
        training=report(f"{FIGURES}/training.svg", caption="report/training.rst"),
        per_position=report(f"{FIGURES}/acceptance.svg", caption="report/acceptance.rst"),
    log:
        f"{LOGS}/plot/all.log",
    benchmark:
        f"{LOGS}/plot/all.tsv"
    container:
        IMAGE_CPU
    threads: 1
    resources:
        mem_mb=1000,
    params:
        settings=settings("plot"),
    shell:
        f"{LAUNCH}/plot.py"
        " --settings {params.settings:q}"
        " --acceptance {input.acceptance} --metrics {input.metrics}"
        " --training {output.training} --per-position {output.per_position}"
        " > {log} 2>&1"


rule report:
    input:
        acceptance=ALL_MEASURED,
        runs=of_drafters(f"{DRAFTER}/run.json"),
        vocab=of_drafters(DRAFT_VOCAB, PLAN.trained()),
        tokens=over_shards(TOKENS, PLAN.config["sources"]),
        gates=ALL_GATES,
        leaks=LEAKS,
        checks=of_drafters(DRAFTER_CHECKS),
        audits=of_drafters(AUDIT, PLAN.trained()),
        target=TARGET,
        figures=[f"{FIGURES}/training.svg", f"{FIGURES}/acceptance.svg"],
    output:
        html=report(f"{ROOT}/report.html", caption="report/report.rst"),
        summary=f"{ROOT}/summary.tsv",
    log:
        f"{LOGS}/report/all.log",
    benchmark:
        f"{LOGS}/report/all.tsv"
    container:
        IMAGE_CPU
    threads: 1
    resources:
        mem_mb=1000,
    params:
        settings=settings("report"),
    shell:
        f"{LAUNCH}/report.py"
        " --settings {params.settings:q}"
        f" --root {ROOT} --logs {LOGS}"
        " --html {output.html} --summary {output.summary}"
        " > {log} 2>&1"
