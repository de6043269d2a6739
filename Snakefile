"""draftmill: prompts -> responses -> tokens -> hidden states -> drafter -> tau report."""

from snakemake.utils import min_version

min_version("9.27")

# --configfile replaces the demo's configuration and inherits nothing from it
if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


include: "rules/common.smk"
include: "rules/target.smk"
include: "rules/prompts.smk"
include: "rules/responses.smk"
include: "rules/hidden_states.smk"
include: "rules/train.smk"
include: "rules/import.smk"
include: "rules/acceptance.smk"
include: "rules/report.smk"


rule all:
    default_target: True
    input:
        f"{ROOT}/report.html",
        f"{ROOT}/summary.tsv",
