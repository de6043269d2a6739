"""What training and measuring drafters takes: bytes of memory and floating-point operations, by algorithm.

Activations of EAGLE-3 are not counted, nor the logits of heads beyond lm_head, nor operations of attention: see
FORMULAS.
"""

from dataclasses import dataclass

from draftmill.driver.drafter_config import UNDRAFTED
from draftmill.driver.drafter_size import DrafterSize
from draftmill.driver.target_size import TargetSize
from draftmill.driver.token_estimate import TokenEstimate
from draftmill.dtype_policy import BYTES

BACKWARD = 3  # forward and backward pass, in forward passes
FROZEN = (
    2  # of weights that are not trained, or whose input needs no gradient: a part of it falls away
)
# at the peak of a step, per logit: the drafter's and the target's, and what a loss keeps of them
LOGIT_BYTES = {"ce": 12, "tv": 20, "kl_div": 28, "rkl": 28, "jsd": 36}
EAGLE3_LOGIT_BYTES = 8
ANCHORS_AT_ONCE = 64  # in evaluation, see block_drafts.py
FORMULAS = {
    "training": "trained parameters x (weights + gradients + 2 moments + best weights, fp32 in mixed) + frozen "
    "embedding and head + target head + logits (+ activations and masks of blocks)",
    "training, logits": "eagle3: tokens_per_batch x ttt_steps x draft vocabulary x 8 bytes; blocks: blocks x "
    "drafted slots (block_size - 1; dspark: block_size) x draft vocabulary x 12 (ce), 20 (tv), 28 (kl_div, rkl) or "
    "36 (jsd) bytes; what dflash2's selector and dspark's Markov and confidence heads add is not counted",
    "training, blocks of a row": "conversations in tokens_per_batch x anchors (or the answer's tokens)",
    "training, activations of blocks": "blocks x block_size x layers x (28 hidden + 9 intermediate + 18 heads x "
    "head width) bytes",
    "training, masks of blocks": "block tokens x (tokens_per_batch + block tokens), one byte each",
    "training operations": "eagle3: 3 x ttt_steps x 2 x drafter parameters (embedding not) x tokens seen; blocks: "
    "3 x 2 x (parameters of layers and further heads x block tokens + k and v x tokens seen) + 2 x 2 x (fc x tokens seen + "
    "head x drafted tokens); attention is not counted",
    "acceptance": "eagle3: draft_tokens x 2 x drafter parameters (embedding not) x tokens of the test sources; "
    "blocks: 2 x (parameters of layers and further heads x (draft_tokens + 1) + head x draft_tokens) x their answers' tokens, and fc, k "
    "and v of a conversation once per 64 of them",
}


@dataclass(frozen=True)
class Row:
    """A packed row of training, conversations being of mean length.

    tokens: of it. blocks: whose anchors are drawn in it (block drafters).
    """

    tokens: int
    blocks: float


def row_of(settings: dict, train: dict[str, TokenEstimate], generated: set[str]) -> Row:
    """train: the training sources. generated: those whose answers the target gives."""
    training = settings["training"]
    tokens = training["tokens_per_batch"]
    if "anchors" not in training:
        return Row(tokens, 0)
    samples = max(1, sum(e.samples for e in train.values()))
    length = min(tokens, max(1.0, sum(e.tokens for e in train.values()) / samples))
    # of given answers it is not known where they begin
    answers = sum(e.tokens - (e.prompt_tokens if n in generated else 0) for n, e in train.items())
    return Row(tokens, tokens / length * min(training["anchors"], answers / samples, length))


def training_bytes(settings: dict, found: DrafterSize, row: Row, size: TargetSize) -> int:
    training = settings["training"]
    each = BYTES["float32" if training["precision"] == "mixed" else "bfloat16"]
    vocab = min(settings["draft_vocab_size"] or size.vocab, size.vocab)
    held = found.trained * each * (4 + 1)  # weights, gradients, two moments; the best weights
    held += found.frozen * each + vocab * size.hidden * BYTES[size.dtype]
    if settings["algorithm"] == "eagle3":
        return round(held + row.tokens * settings["ttt_steps"] * vocab * EAGLE3_LOGIT_BYTES)
    block = settings["block_size"]
    held += row.blocks * slots_of(settings) * vocab * LOGIT_BYTES[training["loss"]]
    queries = row.blocks * block
    held += queries * found.kept_bytes + queries * (row.tokens + queries)
    return round(held)


def slots_of(settings: dict) -> int:
    """Tokens that a block drafts."""
    return settings["block_size"] - UNDRAFTED[settings["algorithm"]]


def training_operations(settings: dict, found: DrafterSize, row: Row) -> float:
    training = settings["training"]
    rows = training["steps"] * training["gradient_accumulation"]
    if settings["algorithm"] == "eagle3":
        return rows * BACKWARD * settings["ttt_steps"] * 2 * found.multiplied * row.tokens
    drafted = row.blocks * slots_of(settings)
    trained = found.body * (drafted + row.blocks) + found.keys * row.tokens
    frozen = found.fc * row.tokens + found.head * drafted
    return rows * 2 * (BACKWARD * trained + FROZEN * frozen)


def acceptance_operations(
    settings: dict, found: DrafterSize, test: dict[str, TokenEstimate], generated: set[str]
) -> float:
    """test: the test sources."""
    steps = settings["draft_tokens"]
    if settings["algorithm"] == "eagle3":
        return steps * 2 * found.multiplied * sum(e.tokens for e in test.values())
    total = 0.0
    for name, source in test.items():
        answers = source.tokens - (source.prompt_tokens if name in generated else 0)
        length = source.tokens / max(1, source.samples)
        drafted = found.body * (steps + 1) + found.head * steps
        total += 2 * answers * (drafted + (found.fc + found.keys) * length / ANCHORS_AT_ONCE)
    return total
