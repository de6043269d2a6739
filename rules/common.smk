# Configuration, plan and path patterns; no rules.
#
# PLAN knows every job's settings string: the code it runs, the slice of the configuration it needs and
# the fingerprints of its inputs. Each rule has that string as its only param, so Snakemake sees as
# stale exactly what can change.

import os
import sys

sys.path.insert(0, f"{workflow.basedir}/scripts")

from draftmill.driver import session
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from draftmill.errors import DraftmillError

try:
    PLAN = Plan(completed(config))
    ROOT = PLAN.root
    SESSION = session.open_session(workflow, PLAN)
except DraftmillError as error:
    raise WorkflowError(str(error)) from None

SCRIPTS = f"{workflow.basedir}/scripts"
LAUNCH = f"python {SCRIPTS}/draftmill/launch.py --plan {session.plan_file(ROOT)} {SCRIPTS}"
STATES = f"{ROOT}/hidden_states/{{capture}}/{{source}}"
keep_states = PLAN.config["hidden_states"]["keep_states"]


wildcard_constraints:
    source="[A-Za-z0-9_-]+",
    capture="[A-Za-z0-9_-]+",
    drafter="[A-Za-z0-9_-]+",
    shard=r"\d+",


onstart:
    session.begin(SESSION)


def settings(rule):
    """The params function of a rule: its settings string for the job's wildcards."""
    return lambda wildcards: PLAN.settings(rule, **wildcards)


def of_sources(pattern, names):
    """A path pattern expanded over all shards of the named sources."""
    return [
        pattern.format(source=name, shard=shard)
        for name in names
        for shard in PLAN.shards(name)
    ]


def counted(names):
    """The named sources as NAME:SHARDS, for scripts that read whole folders."""
    return [f"{name}:{len(PLAN.shards(name))}" for name in names]
