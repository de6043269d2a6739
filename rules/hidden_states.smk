# in:  tokens/{source}/{shard}.parquet, target/
# out: hidden_states/{capture}/{source}/{shard}.parquet, and a manifest.json per source
#      gates/{capture}/{source}/{shard}.json: what the manifest, and so training, waits for


rule extract_hidden_states:
    input:
        tokens=f"{ROOT}/tokens/{{source}}/{{shard}}.parquet",
        target=f"{ROOT}/target/manifest.json",
    output:
        states=(
            f"{STATES}/{{shard}}.parquet"
            if keep_states
            else temp(f"{STATES}/{{shard}}.parquet")
        ),
    params:
        settings=settings("extract_hidden_states"),
    log:
        f"logs/{PLAN.config['run']}/extract_hidden_states/{{capture}}-{{source}}-{{shard}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/extract_hidden_states/{{capture}}-{{source}}-{{shard}}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
    shell:
        "exec {LAUNCH}/extract_hidden_states.py --settings {params.settings:q}"
        " --target {input.target} --tokens {input.tokens}"
        " --output {output.states} > {log} 2>&1"


rule gate_hidden_states:
    input:
        states=f"{STATES}/{{shard}}.parquet",
        tokens=f"{ROOT}/tokens/{{source}}/{{shard}}.parquet",
        target=f"{ROOT}/target/manifest.json",
        head=f"{ROOT}/target/head.safetensors",
    output:
        gate=f"{ROOT}/gates/{{capture}}/{{source}}/{{shard}}.json",
    params:
        settings=settings("gate_hidden_states"),
    log:
        f"logs/{PLAN.config['run']}/gate_hidden_states/{{capture}}-{{source}}-{{shard}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/gate_hidden_states/{{capture}}-{{source}}-{{shard}}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
    shell:
        "exec {LAUNCH}/gate_hidden_states.py --settings {params.settings:q}"
        " --target {input.target} --head {input.head} --tokens {input.tokens}"
        " --hidden-states {input.states} --output {output.gate} > {log} 2>&1"


def shards_of(pattern):
    """The shard files of a capture of a source."""
    return lambda wildcards: [
        pattern.format(capture=wildcards.capture, source=wildcards.source, shard=shard)
        for shard in PLAN.shards(wildcards.source)
    ]


rule index_hidden_states:
    input:
        states=shards_of(f"{STATES}/{{shard}}.parquet"),
        gates=lambda wildcards: ancient(
            shards_of(f"{ROOT}/gates/{{capture}}/{{source}}/{{shard}}.json")(wildcards)
        ),
        target=f"{ROOT}/target/manifest.json",
    output:
        manifest=f"{STATES}/manifest.json",
    params:
        settings=settings("index_hidden_states"),
    log:
        f"logs/{PLAN.config['run']}/index_hidden_states/{{capture}}-{{source}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/index_hidden_states/{{capture}}-{{source}}.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    shell:
        "exec {LAUNCH}/index_hidden_states.py --settings {params.settings:q}"
        " --target {input.target} --shards $(echo {input.states} | wc -w)"
        " --output {output.manifest} > {log} 2>&1"
