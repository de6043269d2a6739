# in:  the target's files (a folder, a hub id, or a GGUF in a package)
#      the golden table of the tokenizer, if there is one: its content is in the settings
# out: target/manifest.json, target/head.safetensors and, from a GGUF, target/checkpoint/


rule prepare_target:
    output:
        manifest=TARGET,
        head=HEAD,
        checkpoint=CHECKPOINT,
    log:
        f"{LOGS}/prepare_target/all.log",
    benchmark:
        f"{LOGS}/prepare_target/all.tsv"
    container:
        IMAGE_CUDA
    threads: 1
    resources:
        mem_mb=PREPARATION_MB,
        # a resource, as those make nothing stale: moved elsewhere it is the same table
        golden=GOLDEN,
    params:
        settings=settings("prepare_target"),
    shell:
        f"{LAUNCH}/prepare_target.py"
        " --settings {params.settings:q}"
        " --golden {resources.golden} --manifest {output.manifest} --head {output.head}"
        " > {log} 2>&1"
