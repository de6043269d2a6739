"""DFlash: speculators' block drafter, with anchors per document and the target's own head for the targets.

Conventions met here: our layer i is the OUTPUT of decoder layer i, as z-lab's `target_layer_ids` count;
speculators' `aux_hidden_state_layer_ids` are one higher. Nothing is shifted: a block whose anchor stands at
place a has mask tokens for a+1, a+2, ...; slot k is trained against the target's logits at a+k-1, those
for the token at a+k. Context states are those before the anchor: the anchor's own is not known yet when a
block is drafted (arXiv 2602.06036; z-lab's dflash_generate).
"""

from collections.abc import Callable
from pathlib import Path

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.losses.eager import ce_loss
from speculators.losses.utils import dflash_loss_decay, dpace_loss_decay
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import nn

from draftmill import (
    anchor_blocks,
    exported_drafter,
    initial_layers,
    mask_token,
    visible_attention,
)
from draftmill.drafter_layers import drafter_layers
from draftmill.dtype_policy import cast
from draftmill.errors import DraftmillError
from draftmill.input_noise import noised
from draftmill.predictions import Predictions
from draftmill.target_head import TargetHead

DRAFTING = "block"
ATTENTION = {
    "cpu": visible_attention.NAME,
    "cuda": "simple_flex_attention",
}  # flex has no backward on a CPU
GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}  # block -> decay of the loss, arXiv 2602.06036
DPACE_ALPHA = 0.5  # speculators' default
ANCHORS_AT_ONCE = 64  # in evaluation: bounds the masks
PADDED_TO = 128  # flex attention's masks are made of whole blocks


def config_of(
    settings: dict, manifest: dict, device: str, draft_vocab_size: int
) -> DFlashSpeculatorConfig:
    """speculators' configuration of a new drafter for this target."""
    decoder = drafter_layers(manifest, settings["num_layers"], "qwen3", settings["sliding_window"])
    decoder._attn_implementation = ATTENTION[device]
    verifier = VerifierConfig.from_pretrained(manifest["checkpoint"])
    verifier.name_or_path = manifest["name"]
    block = settings["block_size"]
    return DFlashSpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=draft_vocab_size,
        block_size=block,
        mask_token_id=mask_token.settled(settings["mask_token_id"], manifest),
        aux_hidden_state_layer_ids=[i + 1 for i in settings["layers"]["output_of"]],
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block - 1)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )


def new_drafter(
    config: DFlashSpeculatorConfig,
    head: dict[str, torch.Tensor],
    t2d: torch.Tensor,
    d2t: torch.Tensor,
    dtype: torch.dtype,
) -> DFlashDraftModel:
    """A drafter with random layers and the target's embedding and lm_head rows, both frozen."""
    model = empty(config)
    model.load_vocab_mappings(t2d, d2t)
    kept = t2d if model.use_draft_vocab else slice(None)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(head["embed_tokens.weight"][: model.verifier_vocab_size])
        model.lm_head.weight.copy_(head["lm_head.weight"][kept])
    for frozen in (model.embed_tokens, model.lm_head):
        frozen.weight.requires_grad_(False)
    return cast(model, dtype)


def initialise(
    drafter: DFlashDraftModel,
    settings: dict,
    manifest: dict,
    tensors: dict[str, torch.Tensor],
    aux: torch.Tensor,
) -> None:
    """Starts the layers from the target's own, where the configuration says so.

    tensors: head.safetensors. aux: [tokens, layers * hidden], states of some training text.
    """
    first = settings["initial_layers"]
    if first is not None:
        layers = settings["layers"]["output_of"]
        initial_layers.start_from(drafter, first, layers, manifest, tensors, aux)


def empty(config: DFlashSpeculatorConfig) -> DFlashDraftModel:
    """The model without speculators' own copy of the target's norm and head: it knows neither softcap, scale
    nor bias, and not every family's norm."""
    verifier = config.speculators_config.verifier
    name, verifier.name_or_path = verifier.name_or_path, None  # or it is looked up for its norm
    try:
        model = DFlashDraftModel(config)
    finally:
        verifier.name_or_path = name
    model.verifier_norm = nn.Identity()
    model.verifier_lm_head = nn.Identity()
    return model


def drafted(
    model: DFlashDraftModel,
    aux: torch.Tensor,
    ids: torch.Tensor,
    documents: torch.Tensor,
    positions: torch.Tensor,
    anchors: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """Logits of every block's slots after the anchor: [anchors, block - 1, draft vocabulary].

    aux [tokens, layers * hidden], ids, documents and positions [tokens]: one packed row.
    anchors: int64 [anchors], places in it.
    """
    device = aux.device
    context = model.hidden_norm(model.fc(aux))[None]
    slots = torch.full((len(anchors), block), model.mask_token_id, device=device)
    slots[:, 0] = ids[anchors]
    hidden = model.embed_tokens(slots.view(1, -1))
    angles = anchor_blocks.block_positions(positions[anchors], block).flatten()
    angles = model.rotary_emb(hidden, torch.cat([positions, angles])[None])
    masks = {}
    for index, layer in enumerate(model.layers):
        window = model.sliding_window if index in model.sliding_window_indices else None
        if window not in masks:
            masks[window] = anchor_blocks.visibility(
                documents, anchors, block, window, device.type, model.sliding_window_non_causal
            )
        hidden = layer(
            hidden_states=hidden,
            target_hidden=context,
            attention_mask=masks[window],
            position_embeddings=angles,
        )
    hidden = model.norm(hidden).view(len(anchors), block, -1)[:, 1:]
    # a view of three dimensions would copy lm_head once per block
    return model.lm_head(hidden.flatten(0, 1)).unflatten(0, (len(anchors), block - 1))


def entry(drafter: DFlashDraftModel) -> nn.Module:
    """The module that the target's states enter: where their dtype is checked."""
    return drafter.fc


class WithTargets(nn.Module):
    """A drafter whose training targets come from the target's own head."""

    def __init__(self, drafter: DFlashDraftModel, head: TargetHead, settings: dict):
        super().__init__()
        self.drafter = drafter
        object.__setattr__(self, "head", head)  # not a submodule: never trained, saved or cast
        training = settings["training"]
        self.noise, self.block = training["noise"], settings["block_size"]
        ((self.loss, _),) = resolve_loss_config(training["loss"], "eager").values()
        self.dpace = training["position_weights"] == "dpace"
        self.gamma = training["gamma"] or gamma_of(self.block)

    def predict(self, batch: dict[str, torch.Tensor]) -> Predictions:
        """The drafts of a packed batch (see packing.pack), those of `batch["anchors"]`."""
        row = {name: value[0] for name, value in batch.items()}
        anchors = row["anchors"].nonzero().flatten()
        if not len(anchors):  # no answer in this pack: a block without loss keeps the shapes
            anchors = anchors.new_zeros(1)
        places = anchor_blocks.block_positions(anchors, self.block)[:, 1:]
        # slot k's target: the logits at the place before it
        before = (places - 1).clamp(max=len(row["input_ids"]) - 1)
        with torch.no_grad():
            once, where = torch.unique(before, return_inverse=True)
            targets = self.head(row["last"][once][None])[0].float()[where]
        aux = noised(row["aux"], self.noise) if self.training else row["aux"]
        logits = drafted(
            self.drafter,
            aux,
            row["input_ids"],
            row["document_ids"],
            row["position_ids"],
            anchors,
            self.block,
        )
        scored = anchor_blocks.supervised(
            anchors, self.block, row["loss_mask"], row["document_ids"]
        )[:, 1:]
        # losses, accuracies and their reductions in fp32, whatever the weights are
        logits = logits.float().flatten(0, 1)
        targets = targets.flatten(0, 1)
        return Predictions(
            logits=logits,
            targets=targets,
            weights=self.weights(logits, targets, scored),
            position=places.flatten(),
            anchor=anchors.repeat_interleave(self.block - 1),
        )

    def weights(
        self, logits: torch.Tensor, targets: torch.Tensor, scored: torch.Tensor
    ) -> torch.Tensor:
        """fp32 [drafts]: how each slot counts, 0 where `scored` [anchors, block - 1] is false.

        As speculators has it: the position's weight over the number of scored slots.
        """
        # D-PACE's weights grow with the drafter's confidence: as a measure over time, fixed ones are needed
        if (
            self.dpace and self.training
        ):  # its confidence is that in the target's choice, whatever the loss
            losses = ce_loss(logits.detach()[None], targets[None])
            found = dpace_loss_decay(None, scored, self.block - 1, DPACE_ALPHA, losses)[0]
        else:
            slots = torch.arange(1, self.block, device=scored.device).expand(scored.shape)
            found = (dflash_loss_decay(slots, self.gamma) * scored).flatten()
        return found.float() / (scored.sum() + 1e-5)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        """Loss (fp32 scalar) and metrics of a packed batch."""
        found = self.predict(batch)
        losses = self.loss(found.logits[None], found.targets[None])[0]
        scored = (found.weights > 0).sum()
        return (losses * found.weights).sum(), self.metrics(found) | {"scored": scored}

    @torch.no_grad()
    def metrics(self, found: Predictions) -> dict[str, torch.Tensor]:
        """full_acc_k: blocks in which the drafts 0 to k are all the target's choice, of those that hold k."""
        scored = (found.weights > 0).view(-1, self.block - 1)
        right = (found.logits.argmax(-1) == found.targets.argmax(-1)).view(-1, self.block - 1)
        right = (right & scored).cumprod(-1)
        metrics = {}
        for k in range(self.block - 1):
            metrics[f"full_acc_{k}_sum"] = right[:, k].sum()
            metrics[f"full_acc_{k}_total"] = scored[:, k].sum()
        return metrics


def gamma_of(block: int) -> float:
    """The published decay for this block; between and beyond the published blocks, in proportion."""
    if block in GAMMAS:
        return GAMMAS[block]
    return block * GAMMAS[16] / 16


def prepared(settings: dict) -> Callable[[dict, str], dict]:
    """What makes a sample what DFlash sees: (sample, draw) -> the sample, with the anchors of this draw."""

    def prepare(sample: dict[str, torch.Tensor], draw: str) -> dict[str, torch.Tensor]:
        count = settings["training"]["anchors"]
        positions = torch.arange(len(sample["input_ids"]))
        anchors = anchor_blocks.drawn(sample["loss_mask"], count, draw)
        return sample | {"position_ids": positions, "anchors": anchors}

    return prepare


def length(tokens: int) -> int:
    """Rows of a prepared sample."""
    return tokens


def load(folder: Path, device: str) -> DFlashDraftModel:
    """An exported drafter, every weight from its file, in the dtypes of that file."""
    config = exported_drafter.read_config(folder)
    config.transformer_layer_config._attn_implementation = ATTENTION[device]
    return exported_drafter.filled(empty(config), folder).to(device)


def check_target(model: DFlashDraftModel, manifest: dict, layers: list[int], folder: Path) -> None:
    """Refuses a drafter that was made for another target, whatever fingerprints it carries.

    layers: output_of of the states it is to read. Raises DraftmillError that names both.
    """
    ids = model.config.aux_hidden_state_layer_ids
    exported_drafter.check_target(model, ids, manifest, layers, folder)
    if not 0 <= (model.config.mask_token_id or 0) < manifest["embedding_rows"]:
        raise DraftmillError(
            f"{folder}/config.json: mask_token_id is {model.config.mask_token_id}, but the target embeds "
            f"{manifest['embedding_rows']} tokens; the drafter is not one for this target."
        )


@torch.inference_mode()
def drafts(
    model: DFlashDraftModel,
    sample: dict[str, torch.Tensor],
    steps: int,
    start: int = 1,
    end: int | None = None,
) -> torch.Tensor:
    """What the drafter would propose at every anchor of a sample, in teacher-forced passes.

    sample: input_ids [tokens], aux [tokens, layers * hidden]. start: the first anchor. end: no block reaches
    past this many tokens, more or fewer than there are: prompt and length limit of an answer (z-lab's loop
    shortens the blocks before it, where the answer ends by itself too).
    Returns int64 [tokens - 1, steps]: row j, with token j+1 (the anchor) the last one known, holds the target
    vocabulary's ids of the drafts for tokens j+2, j+3, ...; -1 in rows and places that are not drafted.

    A block is drafted at once, from states before its anchor alone, so this is what a loop would draft.
    """
    device, ids = model.fc.weight.device, sample["input_ids"]
    padding = -len(ids) % PADDED_TO if device.type == "cuda" else 0
    aux = nn.functional.pad(sample["aux"], (0, 0, 0, padding)).to(device)
    padded = nn.functional.pad(ids, (0, padding)).to(device)
    documents = torch.zeros(len(padded), dtype=torch.long, device=device)
    documents[len(ids) :] = -1
    positions = torch.arange(len(padded), device=device)
    rows = torch.full((len(ids) - 1, steps), -1)
    for count, anchors in blocks_of(start, len(ids), steps, end):
        logits = drafted(model, aux, padded, documents, positions, anchors.to(device), count + 1)
        found = logits.argmax(-1)
        found = found if model.d2t is None else found + model.d2t[found]
        rows[anchors - 1, :count] = found.cpu()
    return rows


def blocks_of(start: int, tokens: int, steps: int, end: int | None):
    """(slots after the anchor, anchors) in groups that share their number of slots."""
    full = tokens if end is None else min(tokens, max(start, end - steps))
    for first in range(start, full, ANCHORS_AT_ONCE):
        yield steps, torch.arange(first, min(full, first + ANCHORS_AT_ONCE))
    for anchor in range(full, tokens - 1):
        yield end - 1 - anchor, torch.tensor([anchor])
