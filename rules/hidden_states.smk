# in:  tokens/{source}/{shard}.parquet, target/
# out: hidden_states/{capture}/{source}/{shard}.parquet, and a manifest.json per source
#      gates/{capture}/{source}/{shard}.json: what the manifest, and so training, waits for
#
# backend and shards_per_job change no byte, so they are resources: set them in a profile or by
# --set-resources. Above one shard per job, rules like extract_hidden_states_3 are made below.

EXTRACT = (
    f"{LAUNCH}/extract_hidden_states.py"
    " --settings {params.settings:q}"
    f" --target {TARGET}"
    " --tokens {input.tokens} --output {output}"
    " --backend {resources.backend} --loading {log.loading}"
    " > {log.text} 2>&1"
)
CHECK = (
    f"{LAUNCH}/gate_hidden_states.py"
    " --settings {params.settings:q}"
    f" --target {TARGET} --head {HEAD}"
    " --tokens {input.tokens} --hidden-states {input.states} --output {output}"
    " --backend {resources.backend} --loading {log.loading}"
    " > {log.text} 2>&1"
)


rule extract_hidden_states:
    input:
        tokens=TOKENS,
        target=TARGET,
    output:
        temporary(STATES),
    log:
        text=f"{LOGS}/extract_hidden_states/{{capture}}.{{source}}.{{shard}}.log",
        loading=f"{LOGS}/extract_hidden_states/{{capture}}.{{source}}.{{shard}}.loading.json",
    benchmark:
        f"{LOGS}/extract_hidden_states/{{capture}}.{{source}}.{{shard}}.tsv"
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=RESIDENT_MB,
        backend="auto",
        shards_per_job=1,
    params:
        settings=settings("extract_hidden_states"),
    shell:
        EXTRACT


rule gate_hidden_states:
    input:
        states=STATES,
        tokens=TOKENS,
        target=TARGET,
        head=HEAD,
    output:
        GATE,
    log:
        text=f"{LOGS}/gate_hidden_states/{{capture}}.{{source}}.{{shard}}.log",
        loading=f"{LOGS}/gate_hidden_states/{{capture}}.{{source}}.{{shard}}.loading.json",
    benchmark:
        f"{LOGS}/gate_hidden_states/{{capture}}.{{source}}.{{shard}}.tsv"
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=RESIDENT_MB,
        backend="auto",
        shards_per_job=1,
    params:
        settings=settings("gate_hidden_states"),
    shell:
        CHECK


for number, members in enumerate(several("extract_hidden_states")):

    rule:
        name:
            f"extract_hidden_states_{number}"
        input:
            tokens=over_members(TOKENS, members),
            target=TARGET,
        output:
            [temporary(path) for path in over_members(STATES, members)],
        log:
            text=f"{LOGS}/extract_hidden_states/{job_name(members)}.log",
            loading=f"{LOGS}/extract_hidden_states/{job_name(members)}.loading.json",
        benchmark:
            f"{LOGS}/extract_hidden_states/{job_name(members)}.tsv"
        container:
            IMAGE_CUDA
        threads: 1
        resources:
            mem_mb=RESIDENT_MB,
            backend="auto",
            shards_per_job=1,
        params:
            settings=settings_of("extract_hidden_states", members),
        shell:
            EXTRACT


for number, members in enumerate(several("gate_hidden_states")):

    rule:
        name:
            f"gate_hidden_states_{number}"
        input:
            states=over_members(STATES, members),
            tokens=over_members(TOKENS, members),
            target=TARGET,
            head=HEAD,
        output:
            over_members(GATE, members),
        log:
            text=f"{LOGS}/gate_hidden_states/{job_name(members)}.log",
            loading=f"{LOGS}/gate_hidden_states/{job_name(members)}.loading.json",
        benchmark:
            f"{LOGS}/gate_hidden_states/{job_name(members)}.tsv"
        container:
            IMAGE_CUDA
        threads: 1
        resources:
            mem_mb=RESIDENT_MB,
            backend="auto",
            shards_per_job=1,
        params:
            settings=settings_of("gate_hidden_states", members),
        shell:
            CHECK


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
