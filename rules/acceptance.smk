# in:  drafters/{drafter}/, target/, hidden_states/{capture}/{source}/ of validation and test sources
# out: gates/drafters/{drafter}.json: the exported drafter is what was made, and uses what it is given
#      acceptance/{drafter}/{source}.json: tau, exact and greedy


rule check_drafter:
    input:
        run=f"{DRAFTER}/run.json",
        config=f"{DRAFTER}/config.json",
        model=f"{DRAFTER}/model.safetensors",
        metrics=metrics_of,
        manifests=checked_manifests,
        states=checked_states,
        target=TARGET,
        head=HEAD,
    output:
        checks=DRAFTER_CHECKS,
    log:
        f"{LOGS}/check_drafter/{{drafter}}.log",
    benchmark:
        f"{LOGS}/check_drafter/{{drafter}}.tsv"
    container:
        IMAGE_CUDA
    # a fresh process drafts beside the job's own
    threads: 2
    resources:
        mem_mb=6000,
    params:
        settings=settings("check_drafter"),
    shell:
        f"{LAUNCH}/check_drafter.py"
        " --settings {params.settings:q}"
        " --target {input.target} --head {input.head} --drafter $(dirname {input.run})"
        " --hidden-states {input.manifests} --output {output.checks}"
        " > {log} 2>&1"


rule measure_acceptance:
    input:
        run=f"{DRAFTER}/run.json",
        config=f"{DRAFTER}/config.json",
        model=f"{DRAFTER}/model.safetensors",
        manifest=measured_manifest,
        states=measured_states,
        target=TARGET,
        checks=checks_of,
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
