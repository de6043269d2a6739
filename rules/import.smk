# in:  a drafter that others trained (`path`, or `hub` and `revision`), target/
# out: drafters/{drafter}/: config.json, model.safetensors, run.json
#
# A hub drafter is downloaded in the job; a token comes from the environment (HF_TOKEN) and is written nowhere.


rule import_drafter:
    input:
        target=TARGET,
        head=HEAD,
    output:
        config=f"{DRAFTER}/config.json",
        model=f"{DRAFTER}/model.safetensors",
        run=f"{DRAFTER}/run.json",
    log:
        f"{LOGS}/import_drafter/{{drafter}}.log",
    benchmark:
        f"{LOGS}/import_drafter/{{drafter}}.tsv"
    wildcard_constraints:
        drafter=only(PLAN.made_by("import_drafter")),
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=PREPARATION_MB,
    params:
        settings=settings("import_drafter"),
    shell:
        f"{LAUNCH}/import_drafter.py"
        " --settings {params.settings:q}"
        " --target {input.target} --head {input.head}"
        " --output $(dirname {output.run})"
        " > {log} 2>&1"
