# in:  drafters/{drafter}/, hidden_states/{capture}/{source}/ of a test source
# out: acceptance/{drafter}/{source}.json: tau, exact and greedy


rule measure_acceptance:
    input:
        drafter=[
            f"{ROOT}/drafters/{{drafter}}/{name}"
            for name in ("run.json", "config.json", "model.safetensors")
        ],
        manifest=lambda wildcards: STATES.format(
            capture=PLAN.config["drafters"][wildcards.drafter]["capture"],
            source=wildcards.source,
        )
        + "/manifest.json",
        states=lambda wildcards: [
            STATES.format(
                capture=PLAN.config["drafters"][wildcards.drafter]["capture"],
                source=wildcards.source,
            )
            + f"/{shard}.parquet"
            for shard in PLAN.shards(wildcards.source)
        ],
        target=f"{ROOT}/target/manifest.json",
    output:
        acceptance=f"{ROOT}/acceptance/{{drafter}}/{{source}}.json",
    params:
        settings=settings("measure_acceptance"),
    log:
        f"logs/{PLAN.config['run']}/measure_acceptance/{{drafter}}-{{source}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/measure_acceptance/{{drafter}}-{{source}}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
    shell:
        "exec {LAUNCH}/measure_acceptance.py --settings {params.settings:q}"
        f" --target {{input.target}} --drafter {ROOT}/drafters/{{wildcards.drafter}}"
        " --hidden-states {input.manifest} --output {output.acceptance} > {log} 2>&1"
