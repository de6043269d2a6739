# Configuration, plan, images and path patterns; no rules.
#
# PLAN knows every job's settings string: the code it runs, the slice of the configuration it needs and
# the fingerprints of its inputs. Each rule has that string as its only param, so Snakemake sees as
# stale exactly what can change.

import os
import shlex
import sys

sys.path.insert(0, f"{workflow.basedir}/scripts")

from draftmill import algorithms, job_times
from draftmill.driver import images, job_memory, session, shard_jobs
from draftmill.driver.config import completed
from draftmill.driver.artefacts import CHECKPOINT_FILES
from draftmill.driver.plan import Plan
from draftmill.errors import DraftmillError

try:
    PLAN = Plan(completed(config))
    SESSION = session.open_session(workflow, PLAN)
    IN_CONTAINERS = bool(workflow.deployment_settings.deployment_method)
    IMAGE_CPU = images.container("cpu", IN_CONTAINERS)
    IMAGE_CUDA = images.container("cuda", IN_CONTAINERS)
except DraftmillError as error:
    raise WorkflowError(str(error)) from None


onstart:
    try:
        session.begin(SESSION)
    except DraftmillError as error:
        raise WorkflowError(str(error)) from None


onsuccess:
    for sentence in job_times.warnings(LOGS, PLAN.captured(), PLAN.shard_counts()):
        print(sentence, file=sys.stderr)


ROOT = PLAN.root
LOGS = f"logs/{PLAN.config['run']}"
SCRIPTS = os.path.relpath(f"{workflow.basedir}/scripts")
# exec: the job's process is the script's own, so that signals reach it
LAUNCH = f"exec python {SCRIPTS}/draftmill/launch.py --plan {session.plan_file(ROOT)} {SCRIPTS}"

TARGET = f"{ROOT}/target/manifest.json"
HEAD = f"{ROOT}/target/head.safetensors"
PROMPTS = f"{ROOT}/prompts/{{source}}/{{shard}}.parquet"
RESPONSES = f"{ROOT}/responses/{{source}}/{{shard}}.parquet"
TOKENS = f"{ROOT}/tokens/{{source}}/{{shard}}.parquet"
STATES = f"{ROOT}/hidden_states/{{capture}}/{{source}}/{{shard}}.parquet"
MANIFEST = f"{ROOT}/hidden_states/{{capture}}/{{source}}/manifest.json"
GATE = f"{ROOT}/gates/{{capture}}/{{source}}/{{shard}}.json"
LEAKS = f"{ROOT}/gates/leaks.json"
DRAFTER_CHECKS = f"{ROOT}/gates/drafters/{{drafter}}.json"
AUDIT = f"{ROOT}/gates/audit/{{drafter}}.json"
DRAFT_VOCAB = f"{ROOT}/draft_vocab/{{drafter}}.safetensors"
DRAFTER = f"{ROOT}/drafters/{{drafter}}"
ACCEPTANCE = f"{ROOT}/acceptance/{{drafter}}/{{source}}.json"
FIGURES = f"{ROOT}/figures"

# a GGUF is unpacked here into a checkpoint; other targets are used where they are
CHECKPOINT = (
    [f"{ROOT}/target/checkpoint/{name}" for name in CHECKPOINT_FILES]
    if PLAN.config["target"]["package"]
    else []
)

# quoted here, since an empty list of files must stay empty; the settings hold the table's digest
GOLDEN_PATH = PLAN.config["target"]["tokenizer"]["golden"]
GOLDEN = shlex.quote(GOLDEN_PATH) if GOLDEN_PATH else ""

RESIDENT_MB = job_memory.resident_mb(PLAN.config["target"])
GENERATION_MB = job_memory.generation_mb(PLAN.config)
PREPARATION_MB = job_memory.preparation_mb(PLAN.config["target"])


wildcard_constraints:
    source="[A-Za-z0-9_-]+",
    capture="[A-Za-z0-9_-]+",
    drafter="[A-Za-z0-9_-]+",
    shard=r"\d+",


def settings(rule):
    """The params function of a rule: its settings string for the job's wildcards."""
    return lambda wildcards: PLAN.settings(rule, **wildcards)


def temporary(path):
    """A hidden-state shard, deleted after its last use where keep_states is false."""
    return path if PLAN.config["hidden_states"]["keep_states"] else temp(path)


def over_shards(pattern, names, **fixed):
    """A path pattern over all shards of the named sources."""
    return [pattern.format(source=n, shard=s, **fixed) for n in names for s in PLAN.shards(n)]


def counted(*roles):
    """The sources with these roles as NAME:SHARDS, for scripts that read whole folders."""
    return " ".join(f"{name}:{len(PLAN.shards(name))}" for name in PLAN.with_role(*roles))


def several(rule):
    """The jobs of a rule that take several shards, each a list of (capture, source, shard)."""
    jobs = shard_jobs.members_of(SESSION.jobs, rule)
    for number in range(len(jobs)):
        shard_jobs.inherit(workflow, rule, f"{rule}_{number}")
    return jobs


def job_name(members):
    """The name of such a job's logs: one of its own, whatever else is made with it or before it."""
    return ".".join(members[0]) + f".and_{len(members) - 1}_more"


def over_members(pattern, members):
    """A path pattern over the shards of such a job."""
    return [pattern.format(capture=c, source=n, shard=s) for c, n, s in members]


def settings_of(rule, members):
    """The settings strings of the shards of such a job."""
    return [PLAN.settings(rule, capture=c, source=n, shard=s) for c, n, s in members]


def source_file(wildcards):
    """The file behind a source: ancient, since the settings hold the digest of the shard's rows."""
    path = PLAN.config["sources"][wildcards.source]["path"]
    return ancient(path) if path else []


def responses_of(wildcards):
    """The generated answers of a shard; nothing where the source gives its own."""
    return RESPONSES.format(**wildcards) if PLAN.generates(wildcards.source) else []


def shards_of(pattern):
    """A pattern over the shards of a job's source."""
    return lambda wildcards: over_shards(pattern, [wildcards.source], capture=wildcards.capture)


def guard(gates, guarded):
    """Gates that must have passed before `guarded` is made, without making it stale by their own changes.

    They are ancient only while `guarded` is as planned: where a gate is to run again, Snakemake looks at
    no other reason of a job that it reaches through ancient files alone, and would leave a stale one.
    """
    return [ancient(path) for path in gates] if guarded in SESSION.fresh else gates


def gates_of(wildcards):
    """The gates of a manifest's shards."""
    return guard(shards_of(GATE)(wildcards), MANIFEST.format(**wildcards))


def before_training(wildcards):
    """The gates before a drafter is trained: against leaks, and the audit of its training step."""
    gates = [LEAKS, AUDIT.format(**wildcards)]
    return guard(gates, f"{DRAFTER}/run.json".format(**wildcards))


def checks_of(wildcards):
    """The gate on a drafter, before it is measured."""
    checks = DRAFTER_CHECKS.format(drafter=wildcards.drafter)
    return guard([checks], ACCEPTANCE.format(**wildcards))


def metrics_of(wildcards):
    """The metrics of a drafter's training; nothing where it was not trained here."""
    trained = wildcards.drafter in PLAN.trained()
    return f"{DRAFTER}/metrics.parquet".format(**wildcards) if trained else []


def checked_manifests(wildcards):
    """The manifests of the sources that a drafter is checked on."""
    capture = capture_of(wildcards.drafter)
    names = PLAN.checked_on(wildcards.drafter)
    return [MANIFEST.format(capture=capture, source=name) for name in names]


def checked_states(wildcards):
    """The shards behind those manifests."""
    names = PLAN.checked_on(wildcards.drafter)
    return over_shards(STATES, names, capture=capture_of(wildcards.drafter))


def capture_of(drafter):
    return PLAN.config["drafters"][drafter]["capture"]


def manifests_of(*roles):
    """The manifests of the sources with these roles, in a drafter's capture."""
    return lambda wildcards: [
        MANIFEST.format(capture=capture_of(wildcards.drafter), source=name)
        for name in PLAN.with_role(*roles)
    ]


def states_of(*roles):
    """The shards behind those manifests: named, so that temporary ones live until they are used."""
    return lambda wildcards: over_shards(
        STATES, PLAN.with_role(*roles), capture=capture_of(wildcards.drafter)
    )


def measured_manifest(wildcards):
    return MANIFEST.format(capture=capture_of(wildcards.drafter), source=wildcards.source)


def measured_states(wildcards):
    return over_shards(STATES, [wildcards.source], capture=capture_of(wildcards.drafter))


def of_drafters(pattern, names=PLAN.config["drafters"]):
    """A path pattern over all drafters, or those named."""
    return [pattern.format(drafter=name) for name in names]


def only(names):
    """A wildcard constraint: one of these names, or nothing at all."""
    return "|".join(names) or "(?!)"


ALL_MEASURED = [ACCEPTANCE.format(**at) for at in PLAN.measured()]
ALL_GATES = [
    path
    for capture, source in PLAN.captured()
    for path in over_shards(GATE, [source], capture=capture)
]
