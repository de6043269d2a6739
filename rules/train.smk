# in:  hidden_states/{capture}/{source}/ of the training and validation sources, tokens/, target/
# out: draft_vocab/{drafter}.safetensors
#      gates/audit/{drafter}.json: what the training waits for
#      drafters/{drafter}/: config.json, model.safetensors, metrics.parquet, run.json


rule build_draft_vocab:
    input:
        tokens=over_shards(TOKENS, PLAN.with_role("train")),
        target=TARGET,
    output:
        vocab=DRAFT_VOCAB,
    log:
        f"{LOGS}/build_draft_vocab/{{drafter}}.log",
    benchmark:
        f"{LOGS}/build_draft_vocab/{{drafter}}.tsv"
    container:
        IMAGE_CPU
    threads: 1
    resources:
        mem_mb=2000,
    params:
        settings=settings("build_draft_vocab"),
    shell:
        f"{LAUNCH}/build_draft_vocab.py"
        " --settings {params.settings:q}"
        " --target {input.target}"
        f" --tokens {ROOT}/tokens --sources {counted('train')}"
        " --output {output.vocab}"
        " > {log} 2>&1"


rule audit_training:
    input:
        train=manifests_of("train"),
        validation=manifests_of("validation"),
        states=states_of("train", "validation"),
        vocab=DRAFT_VOCAB,
        target=TARGET,
        head=HEAD,
    output:
        AUDIT,
    log:
        f"{LOGS}/audit_training/{{drafter}}.log",
    benchmark:
        f"{LOGS}/audit_training/{{drafter}}.tsv"
    wildcard_constraints:
        drafter=only(PLAN.trained()),
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=4000,
    params:
        settings=settings("audit_training"),
    shell:
        f"{LAUNCH}/audit_training.py"
        " --settings {params.settings:q}"
        " --target {input.target} --head {input.head} --draft-vocab {input.vocab}"
        " --train {input.train} --validation {input.validation}"
        " --output {output}"
        " > {log} 2>&1"


# one rule for each algorithm, with a script of its own, so that a fix in one leaves the others fresh
for algorithm in algorithms.NAMES:

    rule:
        name:
            f"train_{algorithm}"
        input:
            train=manifests_of("train"),
            validation=manifests_of("validation"),
            states=states_of("train", "validation"),
            vocab=DRAFT_VOCAB,
            target=TARGET,
            head=HEAD,
            gates=before_training,
        output:
            config=f"{DRAFTER}/config.json",
            model=f"{DRAFTER}/model.safetensors",
            metrics=f"{DRAFTER}/metrics.parquet",
            run=f"{DRAFTER}/run.json",
        log:
            f"{LOGS}/train_{algorithm}/{{drafter}}.log",
        benchmark:
            f"{LOGS}/train_{algorithm}/{{drafter}}.tsv"
        wildcard_constraints:
            drafter=only(PLAN.made_by(f"train_{algorithm}")),
        container:
            IMAGE_CUDA
        threads: 2
        resources:
            mem_mb=4000,
        params:
            settings=settings(f"train_{algorithm}"),
        shell:
            # rule, script and log share one name; the loop's own variable would be the last one when the job runs
            f"{LAUNCH}/$(basename $(dirname {{log}})).py"
            " --settings {params.settings:q}"
            " --target {input.target} --head {input.head} --draft-vocab {input.vocab}"
            " --train {input.train} --validation {input.validation}"
            f" --resume {ROOT}/.resume"
            " --output $(dirname {output.run})"
            " > {log} 2>&1"
