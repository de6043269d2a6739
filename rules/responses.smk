# in:  prompts/{source}/{shard}.parquet, target/
# out: responses/{source}/{shard}.parquet: the target's answers as token ids
#      tokens/{source}/{shard}.parquet: input ids and loss mask


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
        mem_mb=GENERATION_MB,
        # how the engine is reached: a resource, since those make nothing stale, unlike params and the text
        engine=PLAN.engine_options,
    params:
        settings=settings("generate_responses"),
    shell:
        f"{LAUNCH}/generate_responses.py"
        " --settings {params.settings:q}"
        " --target {input.target} --prompts {input.prompts}"
        " --engine {resources.engine:q} --output {output.responses}"
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
