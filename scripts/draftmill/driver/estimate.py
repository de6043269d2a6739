"""What a run will cost: bytes, memory, operations, and the share of time that loading the target takes.

Everything is computed from the configuration and the target's config.json; the formulas stand beside the
figures in the output, since each of them leaves something out.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from draftmill.driver import drafter_cost
from draftmill.driver.default_layers import dflash_layers, eagle3_layers
from draftmill.driver.drafter_size import DrafterSize, drafter_size, foreign_size
from draftmill.driver.plan import Plan
from draftmill.driver.shard_bytes import shard_bytes
from draftmill.driver.target_description import checkpoint_folder, target_config
from draftmill.driver.target_jobs import (
    ShardLoad,
    Speeds,
    largest_job,
    loading_of,
    pass_operations,
    shard_loads,
    streamed_bytes,
)
from draftmill.driver.target_size import TargetSize, checkpoint_bytes, target_size
from draftmill.driver.token_estimate import Assumed, TokenEstimate, TokenEstimator
from draftmill.target_passes import ROOM

FORMULAS = {
    "active": "decoder layers (routed experts x experts per token / experts) + final norm + head",
    "resident extraction": "all weights + batch_tokens x (4 hidden + 2 intermediate + states x hidden)",
    "streamed": "largest layer, dequantised + the experts that are filled in at a time + embedding + final norm + "
    "head + batch_tokens x (4 hidden + 2 intermediate) + states in flight + masks",
    "states in flight": "2 x hidden x tokens of the job's shards (the largest); the gate's are gate.rows / 16 "
    "samples of each shard, and of its longest sample twice (not counted)",
    "attention masks": "tokens x longest sequence, one byte each, of padded batches (train sources), per kind "
    "of attention (whole, sliding, chunked); at most",
    "generation": "tokens x 2 active + sequences x 2 layers x hidden x length^2",
    "extraction": "the same without the head",
    "gate": "the same over the gate's samples",
} | drafter_cost.FORMULAS


@dataclass(frozen=True)
class Options:
    """What the configuration does not say."""

    assumed: Assumed
    target_config: Path | None = None
    checkpoint_gb: float | None = None
    shards_per_job: int = 1
    gate_shards_per_job: int = 1
    read_gb_per_second: float = 1.0
    tflops: float = 100.0


def estimate(plan: Plan, options: Options) -> dict:
    """All figures of a run, in bytes, parameters, operations and seconds."""
    config, target = plan.config, plan.config["target"]
    found, where = target_config(target, options.target_config)
    size = target_size(found, target["dtype"])
    folder = checkpoint_folder(target, plan.root)
    stored, basis = checkpoint_bytes(folder, size)
    if options.checkpoint_gb is not None:
        stored, basis = round(options.checkpoint_gb * 1e9), "--checkpoint-gb"
    estimator = TokenEstimator(plan, folder, size.context, options.assumed)
    tokens = {name: estimator.estimate(name) for name in config["sources"]}
    captures = {c: config["hidden_states"]["captures"][c]["output_of"] for c in plan.captures()}
    drafters = {
        name: drafter_size(settings, settings["layers"]["output_of"], found, size)
        if name in plan.trained()
        else foreign_size(settings, size)
        for name, settings in config["drafters"].items()
    }
    disk = disk_use(plan, size, tokens, captures, drafters, options.shards_per_job)
    loads = shard_loads(plan, size, tokens, estimator.limit)
    return {
        "run": config["run"],
        "target": asdict(size) | {"active": size.active, "config": where},
        "checkpoint": {"bytes": stored, "basis": basis},
        "sources": {n: asdict(e) | {"states": disk["states"][n]} for n, e in tokens.items()},
        "drafters": {name: asdict(d) if d else None for name, d in drafters.items()},
        "memory": memory(plan, size, tokens, loads, captures, drafters, options),
        "operations": operations(plan, size, tokens, loads, drafters),
        "loading": loading(config, size, loads, stored, options),
        "disk": disk,
        "layers": {"eagle3": eagle3_layers(size.layers), "dflash": dflash_layers(size.layers)},
        "formulas": FORMULAS,
    }


def disk_use(
    plan: Plan,
    size: TargetSize,
    tokens: dict[str, TokenEstimate],
    captures: dict[str, list[int]],
    drafters: dict[str, DrafterSize | None],
    per_job: int,
) -> dict:
    """Bytes under results/{run}, those already there, and the free space beside them."""
    layouts = {c: shard_bytes(tuple(v), size.hidden, size.dtype) for c, v in captures.items()}
    states = {
        name: {
            c: layouts[c].total(e.tokens, e.samples, e.shards)
            for c, source in plan.captured()
            if source == name
        }
        for name, e in tokens.items()
    }
    head = size.bytes_of(size.embedding + size.output)
    built = size.bytes_of(size.total) if plan.config["target"]["package"] else 0
    exported = sum(size.bytes_of(d.total) for d in drafters.values() if d)
    total = sum(sum(by.values()) for by in states.values()) + head + built + exported
    root = Path(plan.root)
    present = sum(p.stat().st_size for p in root.rglob("*") if p.is_file())
    place = next(p for p in (root, *root.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(place).free
    widest = max(len(layers) for layers in captures.values()) + 1
    return {
        "states": states,
        "head": head,
        "checkpoint": built,
        "drafters": exported,
        "total": total,
        "spilled": size.bytes_of(tokens_of_job(tokens, per_job) * widest * size.hidden),
        "present": present,
        "free": free,
        "kept": plan.config["hidden_states"]["keep_states"],
        "short": max(0, total - present - free),
    }


def tokens_of_job(tokens: dict[str, TokenEstimate], per_job: int) -> float:
    """Tokens of a job that makes the largest shards."""
    shards = (size for e in tokens.values() for size in [e.tokens / e.shards] * e.shards)
    return sum(sorted(shards, reverse=True)[:per_job])


def per_job(options: Options) -> dict[str, int]:
    """Rule -> the shards that one of its jobs takes."""
    return {
        "extract_hidden_states": options.shards_per_job,
        "gate_hidden_states": options.gate_shards_per_job,
    }


def memory(
    plan: Plan,
    size: TargetSize,
    tokens: dict[str, TokenEstimate],
    loads: dict[str, list[ShardLoad]],
    captures: dict[str, list[int]],
    drafters: dict[str, DrafterSize | None],
    options: Options,
) -> dict:
    """Bytes of accelerator (or main) memory per stage; see FORMULAS."""
    widest = max(len(layers) for layers in captures.values()) + 1
    per_token = 4 * size.hidden + 2 * size.intermediate + widest * size.hidden
    batch = plan.config["hidden_states"]["batch_tokens"]
    streamed = {}
    for rule, count in per_job(options).items():
        job = largest_job(loads[rule], count, size)
        masks = round(sum(shard.masks for shard in job))
        streamed[rule] = {
            "bytes": streamed_bytes(size, job, batch),
            "states in flight": round(sum(shard.held(size) for shard in job)) - masks,
            "attention masks": masks,
        }
    training, blocks = {}, {}
    for name in plan.trained():
        settings, row = plan.config["drafters"][name], training_row(plan, tokens, name)
        training[name] = drafter_cost.training_bytes(settings, drafters[name], row, size)
        if row.blocks:
            blocks[name] = round(row.blocks)
    return {
        "resident extraction": size.bytes_of(size.total + batch * per_token),
        "streamed": streamed,
        "auto is resident from": round(size.bytes_of(size.total) / ROOM),
        "training": training,
        "blocks of a row": blocks,
    }


def training_row(plan: Plan, tokens: dict[str, TokenEstimate], drafter: str) -> drafter_cost.Row:
    train = {name: tokens[name] for name in plan.with_role("train")}
    generated = {name for name in train if plan.generates(name)}
    return drafter_cost.row_of(plan.config["drafters"][drafter], train, generated)


def operations(
    plan: Plan,
    size: TargetSize,
    tokens: dict[str, TokenEstimate],
    loads: dict[str, list[ShardLoad]],
    drafters: dict[str, DrafterSize | None],
) -> dict[str, float]:
    """Floating-point operations per stage; see FORMULAS. Those of drafters whose size is not known are left
    out."""
    generated = {name: e for name, e in tokens.items() if plan.generates(name)}
    tested = {name: tokens[name] for name in plan.with_role("test")}
    train = accept = 0.0
    for name, settings in plan.config["drafters"].items():
        found = drafters[name]
        if name in plan.trained():
            row = training_row(plan, tokens, name)
            train += drafter_cost.training_operations(settings, found, row)
        if found:
            measured = drafter_cost.acceptance_operations(settings, found, tested, set(generated))
            accept += measured
    passed = {rule: sum(s.operations for s in shards) for rule, shards in loads.items()}
    return {
        "generation": sum(
            pass_operations(size, e.tokens, e.samples, True) for e in generated.values()
        ),
        "extraction": passed["extract_hidden_states"],
        "gate": passed["gate_hidden_states"],
        "training": train,
        "acceptance": accept,
    }


def loading(
    config: dict,
    size: TargetSize,
    loads: dict[str, list[ShardLoad]],
    stored: int,
    options: Options,
) -> dict:
    """Per rule that loads the target: the share of reading weights in its time, what brings it below LIMIT
    and what a streamed job of so many shards holds."""
    speeds = Speeds(stored / (options.read_gb_per_second * 1e9), options.tflops * 1e12)
    batch, rules = config["hidden_states"]["batch_tokens"], {}
    for rule, count in per_job(options).items():
        rules[rule] = loading_of(loads[rule], count, speeds)
        job = largest_job(loads[rule], rules[rule]["enough"] or 1, size)
        rules[rule]["enough_bytes"] = streamed_bytes(size, job, batch)
    return {
        "seconds": speeds.load,
        "rules": rules,
        "read_gb_per_second": options.read_gb_per_second,
        "tflops": options.tflops,
    }
