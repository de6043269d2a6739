"""Jobs that pass sequences through the target: what they hold while it is streamed, and how long they load it."""

import math
from collections import Counter
from dataclasses import dataclass

from draftmill.driver.plan import Plan
from draftmill.driver.shard_jobs import MOST_SHARDS
from draftmill.driver.target_size import TargetSize
from draftmill.driver.token_estimate import TokenEstimate
from draftmill.dtype_policy import BYTES
from draftmill.job_times import LIMIT
from draftmill.layer_inputs import ROWS_PER_SAMPLE


@dataclass(frozen=True)
class ShardLoad:
    """What one shard of one capture sends through the target.

    capture: its name; a job takes shards of one. masks: bytes of attention masks, at most. operations: floating-point operations.
    """

    tokens: float
    masks: float
    operations: float
    capture: str = ""

    def held(self, size: TargetSize) -> float:
        """Bytes while a layer is awaited: a halted pass keeps the embedding's output beside the layer's input."""
        return self.tokens * 2 * size.hidden * BYTES[size.dtype] + self.masks


def pass_operations(
    size: TargetSize, tokens: float, samples: float, with_head: bool = False
) -> float:
    """Operations of one forward pass of the target over samples of equal length."""
    parameters = size.active_layers + (size.output if with_head else 0)
    return tokens * (2 * parameters + 2 * size.layers * size.hidden * tokens / max(1, samples))


def shard_loads(
    plan: Plan, size: TargetSize, tokens: dict[str, TokenEstimate], limit: float
) -> dict[str, list[ShardLoad]]:
    """Rule -> its shards, of all captures.

    limit: tokens of the longest sequence. A batch that is padded holds two sequences at least.
    """
    settings = plan.config["hidden_states"]
    longest = min(limit, settings["batch_tokens"] // 2)
    picked = math.ceil(settings["gate"]["rows"] / ROWS_PER_SAMPLE)
    found: dict[str, list[ShardLoad]] = {"extract_hidden_states": [], "gate_hidden_states": []}
    for capture, name in plan.captured():
        source = tokens[name]
        each, samples = source.tokens / source.shards, source.samples / source.shards
        padded = plan.config["sources"][name]["role"] == "train"
        # one byte for each pair of tokens
        masks = size.mask_kinds * each * longest if padded else 0
        whole = ShardLoad(each, masks, pass_operations(size, each, samples), capture)
        share = min(1.0, picked / samples) if samples else 1.0
        checked = pass_operations(size, each * share, samples * share)
        found["extract_hidden_states"] += [whole] * source.shards
        found["gate_hidden_states"] += [
            ShardLoad(each * share, 0, checked, capture)
        ] * source.shards
    return found


def largest_job(shards: list[ShardLoad], per_job: int, size: TargetSize) -> list[ShardLoad]:
    """The shards of a job that holds the most."""
    jobs: dict[str, list[ShardLoad]] = {}
    for shard in sorted(shards, key=lambda shard: shard.held(size), reverse=True):
        job = jobs.setdefault(shard.capture, [])
        if len(job) < per_job:
            job.append(shard)
    return max(jobs.values(), key=lambda job: sum(shard.held(size) for shard in job))


def streamed_bytes(size: TargetSize, job: list[ShardLoad], batch_tokens: int) -> int:
    """Memory of a streamed job: a layer, what stands beside the layers, a batch's activations, and what the
    halted passes hold."""
    weights = size.largest_layer + size.experts_part + size.beside_layers
    batch = batch_tokens * (4 * size.hidden + 2 * size.intermediate)
    return size.bytes_of(weights + batch) + round(sum(shard.held(size) for shard in job))


@dataclass(frozen=True)
class Speeds:
    """load: seconds that one job loads the target. operations: per second."""

    load: float
    operations: float


def loading_of(shards: list[ShardLoad], per_job: int, speeds: Speeds) -> dict:
    """The share of a rule's time that goes into reading weights, and the fewest shards a job that bring it
    below LIMIT; None where MOST_SHARDS do not."""
    computing = sum(shard.operations for shard in shards) / speeds.operations
    by_capture = Counter(shard.capture for shard in shards)

    def share(count: int) -> float:
        # a job takes shards of several sources, of one capture
        jobs = sum(math.ceil(n / count) for n in by_capture.values())
        return jobs * speeds.load / (jobs * speeds.load + computing)

    most = min(max(by_capture.values()), MOST_SHARDS)
    return {
        "computing": computing,
        "share": share(per_job),
        "shards_per_job": per_job,
        "enough": next((n for n in range(1, most + 1) if share(n) <= LIMIT), None),
        "most": most,
        "best_share": share(most),
    }
