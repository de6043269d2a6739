# in:  acceptance/, drafters/, gates/
# out: figures/*.svg, report.html, summary.tsv


MEASURED = [
    f"{ROOT}/acceptance/{m['drafter']}/{m['source']}.json" for m in PLAN.measured()
]
RUNS = [f"{ROOT}/drafters/{drafter}/run.json" for drafter in PLAN.config["drafters"]]


rule plot:
    input:
        acceptance=MEASURED,
        metrics=[path.replace("run.json", "metrics.parquet") for path in RUNS],
        runs=RUNS,
    output:
        training=report(f"{ROOT}/figures/training.svg", caption="report/training.rst"),
        acceptance=report(
            f"{ROOT}/figures/acceptance.svg", caption="report/acceptance.rst"
        ),
    params:
        settings=settings("plot"),
    log:
        f"logs/{PLAN.config['run']}/plot/all.log",
    benchmark:
        f"logs/{PLAN.config['run']}/plot/all.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    shell:
        "exec {LAUNCH}/plot.py --settings {params.settings:q}"
        " --acceptance {input.acceptance} --metrics {input.metrics}"
        " --training {output.training} --per-position {output.acceptance} > {log} 2>&1"


rule report:
    input:
        acceptance=MEASURED,
        runs=RUNS,
        gates=of_sources(
            f"{ROOT}/tokens/{{source}}/{{shard}}.parquet", PLAN.config["sources"]
        )
        + [
            gate.replace("/CAPTURE/", f"/{capture}/")
            for capture in PLAN.captures()
            for gate in of_sources(
                f"{ROOT}/gates/CAPTURE/{{source}}/{{shard}}.json",
                PLAN.config["sources"],
            )
        ],
        leaks=f"{ROOT}/gates/leaks.json",
        vocab=[
            f"{ROOT}/draft_vocab/{drafter}.safetensors"
            for drafter in PLAN.config["drafters"]
        ],
        target=f"{ROOT}/target/manifest.json",
        training=f"{ROOT}/figures/training.svg",
        figure=f"{ROOT}/figures/acceptance.svg",
    output:
        html=report(f"{ROOT}/report.html", caption="report/report.rst"),
        summary=f"{ROOT}/summary.tsv",
    params:
        settings=settings("report"),
    log:
        f"logs/{PLAN.config['run']}/report/all.log",
    benchmark:
        f"logs/{PLAN.config['run']}/report/all.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    shell:
        "exec {LAUNCH}/report.py --settings {params.settings:q}"
        f" --root {ROOT} --logs logs/{PLAN.config['run']}"
        " --html {output.html} --summary {output.summary} > {log} 2>&1"
