# in:  a source: rows of the stdlib list, of a JSONL or Parquet file, or of a data set
# out: prompts/{source}/{shard}.parquet: conversations; gates/leaks.json: no prompt on two sides


rule prepare_prompts:
    input:
        source=source_file,
    output:
        prompts=PROMPTS,
    log:
        f"{LOGS}/prepare_prompts/{{source}}.{{shard}}.log",
    benchmark:
        f"{LOGS}/prepare_prompts/{{source}}.{{shard}}.tsv"
    container:
        IMAGE_CPU
    threads: 1
    resources:
        mem_mb=1000,
    params:
        settings=settings("prepare_prompts"),
    shell:
        f"{LAUNCH}/prepare_prompts.py"
        " --settings {params.settings:q}"
        " --output {output.prompts}"
        " > {log} 2>&1"


rule check_leaks:
    input:
        prompts=over_shards(PROMPTS, PLAN.config["sources"]),
    output:
        gate=LEAKS,
    log:
        f"{LOGS}/check_leaks/all.log",
    benchmark:
        f"{LOGS}/check_leaks/all.tsv"
    container:
        IMAGE_CPU
    threads: 1
    resources:
        mem_mb=2000,
    params:
        settings=settings("check_leaks"),
    shell:
        f"{LAUNCH}/check_leaks.py"
        " --settings {params.settings:q}"
        f" --prompts {ROOT}/prompts --sources {counted()}"
        " --output {output.gate}"
        " > {log} 2>&1"
