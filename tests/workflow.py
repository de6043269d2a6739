"""Runs the real workflow in a copy of the project, on the tiny target."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[1]
PARTS = ("Snakefile", "rules", "scripts", "resources", "profiles", "containers", "envs")
WORDS = [
    "river",
    "stone",
    "cloud",
    "maple",
    "copper",
    "window",
    "garden",
    "violin",
    "harbour",
    "lantern",
]


def rows(count: int, first: int = 0) -> list[dict]:
    """Prompts that differ, of differing lengths, in two categories."""
    return [
        {
            "id": f"row-{i}",
            "category": ("short", "long")[i % 2],
            "prompt": f"Number {i}: tell me about the {WORDS[i % 10]}"
            + f" and {i * 7} more" * (i % 4),
        }
        for i in range(first, first + count)
    ]


def write_rows(path: Path, items: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


def tiny_config(target: Path) -> dict:
    """A run of 20 + 4 + 6 conversations on the tiny target; sources stand in data/."""

    def source(role: str, name: str, **more) -> dict:
        return {"kind": "file", "role": role, "path": f"data/{name}.jsonl", "shard_size": 10} | more

    return {
        "run": "tiny",
        "target": {"path": str(target)},
        "sources": {
            "learn": source("train", "learn"),
            "choose": source("validation", "choose"),
            "judge": source("test", "judge"),
        },
        "responses": {"max_new_tokens": 24, "batch_size": 8},
        "hidden_states": {"captures": {"low": {"output_of": [0, 2, 3]}}, "gate": {"rows": 64}},
        "drafters": {
            "small": {
                "algorithm": "eagle3",
                "capture": "low",
                "draft_vocab_size": 256,
                "ttt_steps": 3,
                "training": {
                    "steps": 12,
                    "tokens_per_batch": 256,
                    "learning_rate": 0.003,
                    "warmup_steps": 2,
                    "validate_every": 4,
                    "save_every": 2,
                },
            }
        },
        "acceptance": {"draft_tokens": 3, "bootstrap": 100},
    }


def with_block_drafter(config: dict, **more) -> dict:
    """The configuration with a DFlash drafter, `block`, beside its own, from the same shards."""
    training = {"steps": 12, "tokens_per_batch": 256, "learning_rate": 0.003, "warmup_steps": 2}
    training |= {"validate_every": 4, "save_every": 2, "anchors": 8}
    config["drafters"]["block"] = {
        "algorithm": "dflash",
        "capture": "low",
        "layers": {"output_of": [0, 2]},
        "draft_vocab_size": 256,
        "num_layers": 2,
        "block_size": 4,
        "mask_token_id": 4,  # in no conversation of the tests
        "training": training,
    } | more
    return config


PAIRS = {"small": "small-again", "block": "block-again"}  # drafter -> its export, taken over


def with_imported(config: dict, folder: str) -> dict:
    """A copy of the configuration in which drafters are only evaluated: the exports in `folder`, as if others had
    trained them."""
    config = copy.deepcopy(config)
    for name, other in PAIRS.items():
        kept = ("algorithm", "capture", "layers")
        section = {k: v for k, v in config["drafters"][name].items() if k in kept}
        config["drafters"][other] = section | {"path": f"{folder}/{name}"}
    return config


def publish(drafters: Path, folder: Path) -> None:
    """Copies what others would find of the exported drafters."""
    for name in PAIRS:
        (folder / name).mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy2(drafters / name / file, folder / name)


def of_algorithm(algorithm: str, **more) -> dict:
    """What makes the drafter of with_block_drafter one of this algorithm, small."""
    own = {
        "dflash": {},
        "dflash2": {"draft_vocab_size": None, "selector_rank": 16, "selector_top_k": 8},
        "dspark": {"markov_rank": 16},
    }
    return {"algorithm": algorithm} | own[algorithm] | more


class Run:
    """One folder with a copy of the project, its data and its results."""

    def __init__(self, folder: Path, config: dict):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            source = PROJECT / part
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / part, ignore=ignore)
            else:
                shutil.copy2(source, folder / part)
        self.write_config(config)

    def write_config(self, config: dict) -> None:
        self.config = config
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def write_data(self, learn: int = 20) -> None:
        write_rows(self.folder / "data/learn.jsonl", rows(learn))
        write_rows(self.folder / "data/choose.jsonl", rows(4, 500))
        write_rows(self.folder / "data/judge.jsonl", rows(6, 600))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        found = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if check:
            assert found.returncode == 0, found.stdout[-6000:]
        return found

    def stale(self, *arguments: str) -> dict[str, int]:
        """rule -> number of jobs that a dry run would start."""
        text = self.snakemake("--dry-run", *arguments).stdout
        if "Nothing to be done" in text:
            return {}
        table = text.rpartition("Job stats:")[2].partition("total")[0]
        jobs = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}
        jobs.pop("all", None)
        return jobs

    def stale_files(self, *arguments: str) -> set[str]:
        """The outputs below results/RUN of the jobs that a dry run would start."""
        text = self.snakemake("--dry-run", *arguments).stdout
        lines = re.findall(r"^    output: (.*)$", text, re.M)
        root = f"results/{self.config['run']}/"
        return {name.removeprefix(root) for line in lines for name in line.split(", ")}

    def copy(self, folder: Path) -> "Run":
        """An independent copy with the same time stamps, Snakemake's records included."""
        shutil.copytree(self.folder, folder, symlinks=True)
        new = object.__new__(Run)
        new.folder, new.config = folder, self.config
        return new

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folder / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} does not hold {old!r}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def result(self, name: str) -> Path:
        return self.folder / "results" / self.config["run"] / name

    def leftovers(self) -> list[Path]:
        """Temporary files that a stage should have removed."""
        return [p for p in (self.folder / "results").rglob("*.tmp") if p.is_file()]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
