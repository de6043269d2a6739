# in:  a source: rows of the stdlib list, of a JSONL or Parquet file, or of a data set
# out: prompts/{source}/{shard}.parquet: conversations; gates/leaks.json: no prompt on two sides


def source_file(wildcards):
    """The file behind a source: ancient, since the settings hold the digest of the shard's rows."""
    path = PLAN.config["sources"][wildcards.source]["path"]
    return ancient(path) if path else []


rule prepare_prompts:
    input:
        source=source_file,
    output:
        prompts=f"{ROOT}/prompts/{{source}}/{{shard}}.parquet",
    params:
        settings=settings("prepare_prompts"),
    log:
        f"logs/{PLAN.config['run']}/prepare_prompts/{{source}}-{{shard}}.log",
    benchmark:
        f"logs/{PLAN.config['run']}/prepare_prompts/{{source}}-{{shard}}.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    shell:
        "exec {LAUNCH}/prepare_prompts.py --settings {params.settings:q}"
        " --output {output.prompts} > {log} 2>&1"


rule check_leaks:
    input:
        prompts=of_sources(
            f"{ROOT}/prompts/{{source}}/{{shard}}.parquet", PLAN.config["sources"]
        ),
    output:
        gate=f"{ROOT}/gates/leaks.json",
    params:
        settings=settings("check_leaks"),
    log:
        f"logs/{PLAN.config['run']}/check_leaks/all.log",
    benchmark:
        f"logs/{PLAN.config['run']}/check_leaks/all.tsv"
    threads: 1
    resources:
        mem_mb=2000,
    shell:
        "exec {LAUNCH}/check_leaks.py --settings {params.settings:q}"
        f" --prompts {ROOT}/prompts --sources {' '.join(counted(PLAN.config['sources']))}"
        " --output {output.gate} > {log} 2>&1"
