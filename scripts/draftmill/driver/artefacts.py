"""Every file that a plan makes, and the fingerprint that it must carry."""

from collections.abc import Iterator
from dataclasses import dataclass

from draftmill.driver.plan import Plan

CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
TARGET_FILES = ("head.safetensors", *(f"checkpoint/{name}" for name in CHECKPOINT_FILES))
DRAFTER_FILES = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class Artefact:
    """One output that carries its fingerprint: where it is, and what it must be."""

    rule: str
    path: str
    fingerprint: str
    companions: tuple[str, ...] = ()  # further files that the same job writes


def artefacts(plan: Plan) -> Iterator[Artefact]:
    """Every artefact of the run that carries a fingerprint."""

    def one(rule: str, path: str, companions=(), **wildcards: str) -> Artefact:
        where = f"{plan.root}/{path.format(**wildcards)}"
        beside = tuple(f"{where.rpartition('/')[0]}/{name}" for name in companions)
        return Artefact(rule, where, plan.fingerprint(rule, **wildcards), beside)

    yield one("prepare_target", "target/manifest.json", TARGET_FILES)
    yield one("check_leaks", "gates/leaks.json")
    for source, shards in plan.ranges.items():
        for shard in shards:
            at = {"source": source, "shard": shard}
            yield one("prepare_prompts", "prompts/{source}/{shard}.parquet", **at)
            if plan.generates(source):
                yield one("generate_responses", "responses/{source}/{shard}.parquet", **at)
            yield one("tokenize_conversations", "tokens/{source}/{shard}.parquet", **at)
            for capture in (c for c, s in plan.captured() if s == source):
                at |= {"capture": capture}
                states = "{capture}/{source}/{shard}"
                yield one("extract_hidden_states", f"hidden_states/{states}.parquet", **at)
                yield one("gate_hidden_states", f"gates/{states}.json", **at)
    for capture, source in plan.captured():
        at = {"capture": capture, "source": source}
        path = "hidden_states/{capture}/{source}/manifest.json"
        yield one("index_hidden_states", path, **at)
    for drafter in plan.config["drafters"]:
        at = {"drafter": drafter}
        files = DRAFTER_FILES
        if drafter in plan.trained():
            yield one("build_draft_vocab", "draft_vocab/{drafter}.safetensors", **at)
            yield one("audit_training", "gates/audit/{drafter}.json", **at)
            files = (*DRAFTER_FILES, "metrics.parquet")
        yield one(plan.train_rule(drafter), "drafters/{drafter}/run.json", files, **at)
        yield one("check_drafter", "gates/drafters/{drafter}.json", **at)
    for at in plan.measured():
        yield one("measure_acceptance", "acceptance/{drafter}/{source}.json", **at)
    yield one("plot", "figures/training.svg", ["acceptance.svg"])
    yield one("report", "report.html", ["summary.tsv"])
