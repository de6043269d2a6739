# in:  prompts/{source}/{shard}.parquet, target/
# out: responses/{source}/{shard}.parquet: the target's answers as token ids
#      tokens/{source}/{shard}.parquet: input ids and loss mask

# how the engine is reached: filled in when a job starts, so that neither the rule's text nor its params,
# which decide what is stale, hold it
ENGINE = PLAN.engine_options


rule generate_responses:
    input:
        prompts=PROMPTS,
        target=TARGET,
    output:
        responses=RESPONSES,
    log:
        f"{LOGS}/generate_responses/{{source}}.{{shard}}.log",
    benchmark:
        f"{LOGS}/generate_responses/{{source}}.{{shard}}.tsv"
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=4000,
    params:
        settings=settings("generate_responses"),
    shell:
        f"{LAUNCH}/generate_responses.py"
        " --settings {params.settings:q}"
        " --target {input.target} --prompts {input.prompts}"
        " --engine {ENGINE:q} --output {output.responses}"
        " > {log} 2>&1"


rule tokenize_conversations:
    input:
        prompts=PROMPTS,
        responses=responses_of,
        target=TARGET,
    output:
        tokens=TOKENS,
    log:
        f"{LOGS}/tokenize_conversations/{{source}}.{{shard}}.log",
    benchmark:
        f"{LOGS}/tokenize_conversations/{{source}}.{{shard}}.tsv"
    container:
        IMAGE_CPU
    threads: 1
    resources:
        mem_mb=2000,
    params:
        settings=settings("tokenize_conversations"),
    shell:
        f"{LAUNCH}/tokenize_conversations.py"
        " --settings {params.settings:q}"
        " --target {input.target} --prompts {input.prompts} --responses {input.responses}"
        " --output {output.tokens}"
        " > {log} 2>&1"
