"""What a run will cost: bytes, memory, operations, and the share of time that loading the target takes.

Everything is computed from the configuration and the target's config.json; the formulas stand beside the
figures in the output, since each of them leaves something out.
"""

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from draftmill.driver.default_layers import dflash_layers, eagle3_layers
from draftmill.driver.drafter_size import DrafterSize, drafter_size
from draftmill.driver.plan import Plan
from draftmill.driver.shard_bytes import shard_bytes
from draftmill.driver.target_description import checkpoint_folder, target_config
from draftmill.driver.target_size import TargetSize, checkpoint_bytes, target_size
from draftmill.driver.token_estimate import Assumed, TokenEstimate, TokenEstimator
from draftmill.dtype_policy import BYTES
from draftmill.target_passes import ROOM
from draftmill.target_skeleton import PARTS

LOADING_SHARE = 0.1  # above it, jobs mostly wait for weights
BACKWARD = 3  # forward and backward pass, in forward passes
FORMULAS = {
    "active": "decoder layers (routed experts x experts per token / experts) + final norm + head",
    "resident extraction": "all weights + batch_tokens x (4 hidden + 2 intermediate + states x hidden)",
    "streamed extraction": "largest layer, dequantised + 1/16 of its largest tensor of experts + embedding + "
    "final norm + head + states in flight (attention masks of padded batches not)",
    "states in flight": "tokens of shards_per_job of the largest shards x hidden",
    "training": "trained parameters x (weights + gradients + 2 moments + best weights, fp32 in mixed) + frozen "
    "embedding and head + target head + tokens_per_batch x ttt_steps x draft vocabulary x 8 bytes of logits",
    "generation": "tokens x 2 active + sequences x 2 layers x hidden x length^2",
    "extraction": "the same without the head",
    "training operations": "3 x ttt_steps x 2 x drafter parameters (embedding not) x tokens seen",
    "acceptance": "draft_tokens x 2 x drafter parameters (embedding not) x tokens of the test sources",
}


@dataclass(frozen=True)
class Options:
    """What the configuration does not say."""

    assumed: Assumed
    target_config: Path | None = None
    checkpoint_gb: float | None = None
    shards_per_job: int = 1
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
        name: drafter_size(settings, captures[settings["capture"]], found, size)
        for name, settings in config["drafters"].items()
    }
    disk = disk_use(plan, size, tokens, captures, drafters, options.shards_per_job)
    return {
        "run": config["run"],
        "target": asdict(size) | {"active": size.active, "config": where},
        "checkpoint": {"bytes": stored, "basis": basis},
        "sources": {n: asdict(e) | {"states": disk["states"][n]} for n, e in tokens.items()},
        "drafters": {name: asdict(d) for name, d in drafters.items()},
        "memory": memory(config, size, tokens, captures, drafters, options.shards_per_job),
        "operations": operations(plan, size, tokens, captures, drafters),
        "loading": loading(plan, size, tokens, captures, stored, options),
        "disk": disk,
        "layers": {"eagle3": eagle3_layers(size.layers), "dflash": dflash_layers(size.layers)},
        "formulas": FORMULAS,
    }


def disk_use(
    plan: Plan,
    size: TargetSize,
    tokens: dict[str, TokenEstimate],
    captures: dict[str, list[int]],
    drafters: dict[str, DrafterSize],
    per_job: int,
) -> dict:
    """Bytes under results/{run}, those already there, and the free space beside them."""
    layouts = {c: shard_bytes(tuple(v), size.hidden, size.dtype) for c, v in captures.items()}
    states = {
        name: {c: layout.total(e.tokens, e.samples, e.shards) for c, layout in layouts.items()}
        for name, e in tokens.items()
    }
    head = size.bytes_of(size.embedding + size.output)
    built = size.bytes_of(size.total) if plan.config["target"]["package"] else 0
    exported = sum(size.bytes_of(d.total) for d in drafters.values())
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


def memory(
    config: dict,
    size: TargetSize,
    tokens: dict[str, TokenEstimate],
    captures: dict[str, list[int]],
    drafters: dict[str, DrafterSize],
    per_job: int,
) -> dict:
    """Bytes of accelerator (or main) memory per stage; see FORMULAS."""
    widest = max(len(layers) for layers in captures.values()) + 1
    per_token = 4 * size.hidden + 2 * size.intermediate + widest * size.hidden
    batch = config["hidden_states"]["batch_tokens"]
    in_flight = tokens_of_job(tokens, per_job) * size.hidden
    streamed = size.largest_layer + size.largest_experts / PARTS + size.beside_layers
    training = {}
    for name, settings in config["drafters"].items():
        found, options = drafters[name], settings["training"]
        each = BYTES["float32" if options["precision"] == "mixed" else "bfloat16"]
        vocab = min(settings["draft_vocab_size"], size.vocab)
        training[name] = round(
            found.trained
            * each
            * (4 + 1)  # weights, gradients, two moments; the best weights so far
            + found.frozen * each
            + vocab * size.hidden * BYTES[size.dtype]
            + options["tokens_per_batch"] * settings["ttt_steps"] * vocab * 8
        )
    return {
        "resident extraction": size.bytes_of(size.total + batch * per_token),
        "streamed extraction": size.bytes_of(streamed + in_flight),
        "states in flight": size.bytes_of(in_flight),
        "auto is resident from": round(size.bytes_of(size.total) / ROOM),
        "training": training,
    }


def pass_operations(size: TargetSize, found: TokenEstimate, with_head: bool) -> float:
    """Operations of one forward pass of the target over a source's tokens."""
    parameters = size.active_layers + (size.output if with_head else 0)
    length = found.tokens / max(1, found.samples)
    return found.tokens * (2 * parameters + 2 * size.layers * size.hidden * length)


def operations(
    plan: Plan,
    size: TargetSize,
    tokens: dict[str, TokenEstimate],
    captures: dict[str, list[int]],
    drafters: dict[str, DrafterSize],
) -> dict[str, float]:
    """Floating-point operations per stage; see FORMULAS."""
    generated = [e for name, e in tokens.items() if plan.generates(name)]
    tested = sum(tokens[name].tokens for name in plan.with_role("test"))
    train = accept = 0.0
    for name, settings in plan.config["drafters"].items():
        options = settings["training"]
        seen = options["steps"] * options["gradient_accumulation"] * options["tokens_per_batch"]
        step = 2 * drafters[name].multiplied
        train += BACKWARD * settings["ttt_steps"] * step * seen
        accept += plan.config["acceptance"]["draft_tokens"] * step * tested
    once = sum(pass_operations(size, e, False) for e in tokens.values())
    return {
        "generation": sum(pass_operations(size, e, True) for e in generated),
        "extraction": once * len(captures),
        "training": train,
        "acceptance": accept,
    }


def loading(
    plan: Plan,
    size: TargetSize,
    tokens: dict[str, TokenEstimate],
    captures: dict[str, list[int]],
    stored: int,
    options: Options,
) -> dict:
    """The share of extraction's time that goes into reading weights, and what brings it below 10 %."""
    seconds = stored / (options.read_gb_per_second * 1e9)
    once = sum(pass_operations(size, e, False) for e in tokens.values())
    computing = once * len(captures) / (options.tflops * 1e12)

    shards = sum(e.shards for e in tokens.values())

    def share(per_job: int) -> float:
        jobs = len(captures) * math.ceil(shards / per_job)  # a job takes shards of several sources
        return jobs * seconds / (jobs * seconds + computing)

    enough = next((n for n in range(1, shards + 1) if share(n) <= LOADING_SHARE), None)
    return {
        "seconds": seconds,
        "computing": computing,
        "share": share(options.shards_per_job),
        "shards_per_job": options.shards_per_job,
        "enough": enough,
        "best_share": share(shards),
        "read_gb_per_second": options.read_gb_per_second,
        "tflops": options.tflops,
    }
