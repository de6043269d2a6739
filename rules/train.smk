# in:  hidden_states/{capture}/{source}/ of the training and validation sources, tokens/, target/
# out: draft_vocab/{drafter}.safetensors
#      drafters/{drafter}/: config.json, model.safetensors, metrics.parquet, run.json


rule build_draft_vocab:
    input:
        tokens=of_sources(
            f"{ROOT}/tokens/{{source}}/{{shard}}.parquet", PLAN.with_role("train")
        ),
        target=f"{ROOT}/target/manifest.json",
    output:
        vocab=f"{ROOT}/draft_vocab/{{drafter}}.safetensors",
    params:
        settings=settings("build_draft_vocab"),
    log:
        f"logs/{PLAN.config['run']}/build_draft_vocab/{{drafter}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/build_draft_vocab/{{drafter}}.tsv"
    threads: 1
    resources:
        mem_mb=2000,
    shell:
        "exec {LAUNCH}/build_draft_vocab.py --settings {params.settings:q}"
        " --target {input.target}"
        f" --tokens {ROOT}/tokens --sources {' '.join(counted(PLAN.with_role('train')))}"
        " --output {output.vocab} > {log} 2>&1"


def manifests_of(*roles):
    """The manifests of the sources with these roles in a drafter's capture."""
    return lambda wildcards: [
        STATES.format(
            capture=PLAN.config["drafters"][wildcards.drafter]["capture"], source=name
        )
        + "/manifest.json"
        for name in PLAN.with_role(*roles)
    ]


def states_of(*roles):
    """The shards behind those manifests: named, so that temporary ones live until they are used."""
    return lambda wildcards: [
        path.replace("manifest.json", f"{shard}.parquet")
        for name, path in zip(
            PLAN.with_role(*roles), manifests_of(*roles)(wildcards), strict=True
        )
        for shard in PLAN.shards(name)
    ]


rule train_eagle3:
    input:
        train=manifests_of("train"),
        validation=manifests_of("validation"),
        states=states_of("train", "validation"),
        vocab=f"{ROOT}/draft_vocab/{{drafter}}.safetensors",
        target=f"{ROOT}/target/manifest.json",
        head=f"{ROOT}/target/head.safetensors",
        leaks=ancient(f"{ROOT}/gates/leaks.json"),
    output:
        config=f"{ROOT}/drafters/{{drafter}}/config.json",
        model=f"{ROOT}/drafters/{{drafter}}/model.safetensors",
        metrics=f"{ROOT}/drafters/{{drafter}}/metrics.parquet",
        run=f"{ROOT}/drafters/{{drafter}}/run.json",
    params:
        settings=settings("train_eagle3"),
    log:
        f"logs/{PLAN.config['run']}/train_eagle3/{{drafter}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/train_eagle3/{{drafter}}.tsv"
    threads: 2
    resources:
        mem_mb=4000,
    shell:
        "exec {LAUNCH}/train_eagle3.py --settings {params.settings:q}"
        " --target {input.target} --head {input.head} --draft-vocab {input.vocab}"
        " --train {input.train} --validation {input.validation}"
        f" --resume {ROOT}/.resume --output {ROOT}/drafters/{{wildcards.drafter}}"
        " > {log} 2>&1"
