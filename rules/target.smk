# in:  the target's files (a folder, a hub id, or a GGUF in a package)
# out: target/manifest.json, target/head.safetensors and, from a GGUF, target/checkpoint/


CHECKPOINT_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
built = CHECKPOINT_FILES if PLAN.config["target"]["package"] else []


rule prepare_target:
    output:
        manifest=f"{ROOT}/target/manifest.json",
        head=f"{ROOT}/target/head.safetensors",
        checkpoint=[f"{ROOT}/target/checkpoint/{name}" for name in built],
    params:
        settings=settings("prepare_target"),
    log:
        f"logs/{PLAN.config['run']}/prepare_target/all.log",
    benchmark:
        f"logs/{PLAN.config['run']}/prepare_target/all.tsv"
    threads: 1
    resources:
        mem_mb=4000,
    shell:
        "exec {LAUNCH}/prepare_target.py --settings {params.settings:q}"
        " --manifest {output.manifest} --head {output.head} > {log} 2>&1"
