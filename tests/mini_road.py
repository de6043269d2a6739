"""The stages called as functions, in one process: the tiny road without Snakemake."""

import argparse
import json
import shutil
from pathlib import Path

import pytest

import audit_training
import build_draft_vocab
import check_drafter
import check_leaks
import extract_hidden_states
import gate_hidden_states
import generate_responses
import import_drafter
import index_hidden_states
import measure_acceptance
import plot
import prepare_prompts
import prepare_target
import report
import tokenize_conversations
from draftmill import algorithms, drafter_training
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from draftmill.errors import DraftmillError
from draftmill.stage import Stage
from workflow import write_rows


class MiniRoad:
    """Runs single jobs of a planned configuration in the current folder."""

    def __init__(self, config: dict):
        self.plan = Plan(completed(config))
        self.root = Path(self.plan.root)
        self.capture = next(iter(self.plan.config["hidden_states"]["captures"]))
        self.target = self.root / "target/manifest.json"
        self.head = self.root / "target/head.safetensors"

    def stage(self, rule: str, **wildcards: str) -> Stage:
        return Stage.parse(self.plan.settings(rule, **wildcards))

    def prepare_target(self, golden: Path | None = None) -> None:
        prepare_target.prepare(self.stage("prepare_target"), self.target, self.head, golden)

    def table(self, kind: str, source: str, shard: str = "00000") -> Path:
        return self.root / kind / source / f"{shard}.parquet"

    def prepare_prompts(self, source: str, shard: str = "00000") -> None:
        stage = self.stage("prepare_prompts", source=source, shard=shard)
        prepare_prompts.prepare(stage, self.table("prompts", source, shard))

    def check_leaks(self) -> None:
        sources = [f"{n}:{len(self.plan.shards(n))}" for n in self.plan.config["sources"]]
        output = self.root / "gates/leaks.json"
        check_leaks.check(self.stage("check_leaks"), self.root / "prompts", sources, output)

    def generate_responses(self, source: str, shard: str = "00000") -> None:
        generate_responses.generate(
            self.stage("generate_responses", source=source, shard=shard),
            self.target,
            self.table("prompts", source, shard),
            json.loads(self.plan.engine_options),
            self.table("responses", source, shard),
        )

    def tokenize_conversations(self, source: str, shard: str = "00000") -> None:
        given = self.table("responses", source, shard) if self.plan.generates(source) else None
        tokenize_conversations.tokenize(
            self.stage("tokenize_conversations", source=source, shard=shard),
            self.target,
            self.table("prompts", source, shard),
            given,
            self.table("tokens", source, shard),
        )

    def states(self, source: str, name: str = "00000.parquet") -> Path:
        return self.root / "hidden_states" / self.capture / source / name

    def extract_hidden_states(self, source: str, shard: str = "00000") -> None:
        stage = self.stage(
            "extract_hidden_states", capture=self.capture, source=source, shard=shard
        )
        output = self.states(source, f"{shard}.parquet")
        shard_files = (stage, self.table("tokens", source, shard), output)
        extract_hidden_states.extract([shard_files], self.target)

    def gate_hidden_states(self, source: str, shard: str = "00000", backend: str = "auto") -> Path:
        output = self.root / f"gates/{self.capture}/{source}/{shard}.json"
        shard_files = (
            self.stage("gate_hidden_states", capture=self.capture, source=source, shard=shard),
            self.table("tokens", source, shard),
            self.states(source, f"{shard}.parquet"),
            output,
        )
        gate_hidden_states.check([shard_files], self.target, self.head, backend)
        return output

    def index_hidden_states(self, source: str) -> None:
        stage = self.stage("index_hidden_states", capture=self.capture, source=source)
        index_hidden_states.index(stage, self.target, self.states(source, "manifest.json"))

    def to_states(self, source: str) -> None:
        """Everything of one source up to its manifest."""
        for shard in self.plan.shards(source):
            self.prepare_prompts(source, shard)
            if self.plan.generates(source):
                self.generate_responses(source, shard)
            self.tokenize_conversations(source, shard)
            self.extract_hidden_states(source, shard)
        self.index_hidden_states(source)

    def build_draft_vocab(self, drafter: str = "small") -> Path:
        names = self.plan.with_role("train")
        sources = [f"{name}:{len(self.plan.shards(name))}" for name in names]
        output = self.root / f"draft_vocab/{drafter}.safetensors"
        stage = self.stage("build_draft_vocab", drafter=drafter)
        build_draft_vocab.build(stage, self.target, self.root / "tokens", sources, output)
        return output

    def training(self, rule: str, drafter: str, output: Path) -> argparse.Namespace:
        """The options of a train script or of the audit."""

        def manifests(role: str) -> list[Path]:
            return [self.states(name, "manifest.json") for name in self.plan.with_role(role)]

        options = {
            "settings": self.stage(rule, drafter=drafter),
            "target": self.target,
            "head": self.head,
            "draft_vocab": self.root / f"draft_vocab/{drafter}.safetensors",
            "train": manifests("train"),
            "validation": manifests("validation"),
            "resume": self.root / ".resume",
            "output": output,
        }
        return argparse.Namespace(**options)

    def train(self, drafter: str = "small") -> Path:
        output = self.root / "drafters" / drafter
        algorithm = algorithms.load(self.plan.algorithm(drafter))
        options = self.training(self.plan.train_rule(drafter), drafter, output)
        drafter_training.train(options, algorithm)
        return output

    def import_drafter(self, drafter: str) -> Path:
        output = self.root / "drafters" / drafter
        stage = self.stage("import_drafter", drafter=drafter)
        import_drafter.import_checkpoint(stage, self.target, self.head, output)
        return output

    def check_drafter(self, drafter: str = "small") -> Path:
        output = self.root / f"gates/drafters/{drafter}.json"
        check_drafter.check(
            self.stage("check_drafter", drafter=drafter),
            self.target,
            self.head,
            self.root / "drafters" / drafter,
            [self.states(name, "manifest.json") for name in self.plan.checked_on(drafter)],
            output,
        )
        return output

    def audit_training(self, drafter: str = "small") -> Path:
        output = self.root / f"gates/audit/{drafter}.json"
        return audit_training.run(self.training("audit_training", drafter, output))

    def measure_acceptance(self, source: str, drafter: str = "small") -> Path:
        output = self.root / f"acceptance/{drafter}/{source}.json"
        measure_acceptance.measure(
            self.stage("measure_acceptance", drafter=drafter, source=source),
            self.target,
            self.root / "drafters" / drafter,
            self.states(source, "manifest.json"),
            output,
        )
        return output

    def report(self) -> Path:
        """The figures and the report of what has been measured; gates are passed first."""
        self.check_leaks()
        for _, source in self.plan.captured():
            for shard in self.plan.shards(source):
                self.gate_hidden_states(source, shard)
        for drafter in self.plan.trained():
            self.audit_training(drafter)
        for drafter in self.plan.config["drafters"]:
            self.check_drafter(drafter)
        measured = self.plan.measured()
        acceptance = [
            self.root / "acceptance/{drafter}/{source}.json".format(**at) for at in measured
        ]
        metrics = [self.root / f"drafters/{name}/metrics.parquet" for name in self.plan.trained()]
        figures = [self.root / f"figures/{name}.svg" for name in ("training", "acceptance")]
        plot.draw(self.stage("plot"), acceptance, metrics, *figures)
        page, table = self.root / "report.html", self.root / "summary.tsv"
        report.write(self.stage("report"), self.root, Path("logs"), page, table)
        return page


def write_data(learn: list, choose: list, judge: list) -> None:
    for name, rows in (("learn", learn), ("choose", choose), ("judge", judge)):
        write_rows(Path("data") / f"{name}.jsonl", rows)


def road_of(config: dict, prepared_target: Path) -> MiniRoad:
    """A road whose target has been prepared already."""
    road = MiniRoad(config)
    shutil.copytree(prepared_target, road.root / "target")
    return road


def prepared_with(config: dict, trust: bool = False, **tokenizer: Path) -> MiniRoad:
    """A road whose target was prepared with these settings of its tokenizer."""
    paths = {key: str(path) for key, path in tokenizer.items()}
    config["target"]["tokenizer"] = paths | {"trust_remote_code": trust}
    road = MiniRoad(config)
    road.prepare_target(tokenizer.get("golden"))
    return road


def refused_with(config: dict, **tokenizer: Path) -> str:
    """The sentence that refuses these settings of the tokenizer."""
    with pytest.raises(DraftmillError) as caught:
        prepared_with(config, **tokenizer)
    return str(caught.value)


def manifest_of(road: MiniRoad) -> dict:
    return json.loads(road.target.read_text(encoding="utf-8"))
