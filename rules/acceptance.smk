# in:  drafters/{drafter}/, hidden_states/{capture}/{source}/ of a test source
# out: acceptance/{drafter}/{source}.json: tau, exact and greedy


rule measure_acceptance:
    input:
        run=f"{DRAFTER}/run.json",
        config=f"{DRAFTER}/config.json",
        model=f"{DRAFTER}/model.safetensors",
        manifest=measured_manifest,
        states=measured_states,
        target=TARGET,
    output:
        acceptance=ACCEPTANCE,
    log:
        f"{LOGS}/measure_acceptance/{{drafter}}.{{source}}.log",
    benchmark:
        f"{LOGS}/measure_acceptance/{{drafter}}.{{source}}.tsv"
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=4000,
    params:
        settings=settings("measure_acceptance"),
    shell:
        f"{LAUNCH}/measure_acceptance.py"
        " --settings {params.settings:q}"
        " --target {input.target} --drafter $(dirname {input.run})"
        " --hidden-states {input.manifest} --output {output.acceptance}"
        " > {log} 2>&1"
