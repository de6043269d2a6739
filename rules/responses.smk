# in:  prompts/{source}/{shard}.parquet, target/
# out: responses/{source}/{shard}.parquet: the target's answers as token ids
#      tokens/{source}/{shard}.parquet: input ids and loss mask


rule generate_responses:
    input:
        prompts=f"{ROOT}/prompts/{{source}}/{{shard}}.parquet",
        target=f"{ROOT}/target/manifest.json",
    output:
        responses=f"{ROOT}/responses/{{source}}/{{shard}}.parquet",
    params:
        settings=settings("generate_responses"),
    log:
        f"logs/{PLAN.config['run']}/generate_responses/{{source}}-{{shard}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/generate_responses/{{source}}-{{shard}}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
    shell:
        "exec {LAUNCH}/generate_responses.py --settings {params.settings:q}"
        " --target {input.target} --prompts {input.prompts}"
        " --output {output.responses} > {log} 2>&1"


def responses_of(wildcards):
    """The generated answers of a shard; nothing where the source gives its own."""
    path = f"{ROOT}/responses/{wildcards.source}/{wildcards.shard}.parquet"
    return path if PLAN.generates(wildcards.source) else []


rule tokenize_conversations:
    input:
        prompts=f"{ROOT}/prompts/{{source}}/{{shard}}.parquet",
        responses=responses_of,
        target=f"{ROOT}/target/manifest.json",
    output:
        tokens=f"{ROOT}/tokens/{{source}}/{{shard}}.parquet",
    params:
        settings=settings("tokenize_conversations"),
    log:
        f"logs/{PLAN.config['run']}/tokenize_conversations/{{source}}-{{shard}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/tokenize_conversations/{{source}}-{{shard}}.tsv"
    threads: 1
    resources:
        mem_mb=2000,
    shell:
        "exec {LAUNCH}/tokenize_conversations.py --settings {params.settings:q}"
        " --target {input.target} --prompts {input.prompts}"
        " --responses {input.responses} --output {output.tokens} > {log} 2>&1"
