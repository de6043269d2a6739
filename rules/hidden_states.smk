# in:  tokens/{source}/{shard}.parquet, target/
# out: hidden_states/{capture}/{source}/{shard}.parquet, and a manifest.json per source
#      gates/{capture}/{source}/{shard}.json: what the manifest, and so training, waits for


rule extract_hidden_states:
    input:
        tokens=TOKENS,
        target=TARGET,
    output:
        states=temporary(STATES),
    log:
        f"{LOGS}/extract_hidden_states/{{capture}}.{{source}}.{{shard}}.log",
    benchmark:
        f"{LOGS}/extract_hidden_states/{{capture}}.{{source}}.{{shard}}.tsv"
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=4000,
    params:
        settings=settings("extract_hidden_states"),
    shell:
        f"{LAUNCH}/extract_hidden_states.py"
        " --settings {params.settings:q}"
        " --target {input.target} --tokens {input.tokens}"
        " --output {output.states}"
        " > {log} 2>&1"


rule gate_hidden_states:
    input:
        states=STATES,
        tokens=TOKENS,
        target=TARGET,
        head=HEAD,
    output:
        gate=GATE,
    log:
        f"{LOGS}/gate_hidden_states/{{capture}}.{{source}}.{{shard}}.log",
    benchmark:
        f"{LOGS}/gate_hidden_states/{{capture}}.{{source}}.{{shard}}.tsv"
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=4000,
    params:
        settings=settings("gate_hidden_states"),
    shell:
        f"{LAUNCH}/gate_hidden_states.py"
        " --settings {params.settings:q}"
        " --target {input.target} --head {input.head} --tokens {input.tokens}"
        " --hidden-states {input.states} --output {output.gate}"
        " > {log} 2>&1"


rule index_hidden_states:
    input:
        states=shards_of(STATES),
        gates=gates_of,
        target=TARGET,
    output:
        manifest=MANIFEST,
    log:
        f"{LOGS}/index_hidden_states/{{capture}}.{{source}}.log",
    benchmark:
        f"{LOGS}/index_hidden_states/{{capture}}.{{source}}.tsv"
    container:
        IMAGE_CPU
    threads: 1
    resources:
        mem_mb=1000,
    params:
        settings=settings("index_hidden_states"),
    shell:
        f"{LAUNCH}/index_hidden_states.py"
        " --settings {params.settings:q}"
        " --target {input.target} --output {output.manifest}"
        " > {log} 2>&1"
