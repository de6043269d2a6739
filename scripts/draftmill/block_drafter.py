"""A block drafter's model, whatever heads it has: speculators' DFlash backbone and our own forward over it.

Conventions met here: our layer i is the OUTPUT of decoder layer i, as z-lab's `target_layer_ids` count;
speculators' `aux_hidden_state_layer_ids` are one higher. Nothing is shifted: a block whose anchor stands at
place a has mask tokens for a+1, a+2, ... Context states are those before the anchor: the anchor's own is not
known yet when a block is drafted.
"""

from pathlib import Path

import torch
from speculators.models.dflash import DFlashDraftModel
from torch import nn

from draftmill import (
    anchor_blocks,
    exported_drafter,
    initial_layers,
    mask_token,
    visible_attention,
)
from draftmill.drafter_layers import drafter_layers
from draftmill.errors import DraftmillError
from draftmill.speculators_drafter import empty, proposal, verifier_of

ATTENTION = {
    "cpu": visible_attention.NAME,
    "cuda": "simple_flex_attention",
}  # flex has no backward on a CPU


def fields(settings: dict, manifest: dict, device: str, algorithm: str, slots: int) -> dict:
    """What the configurations of all block drafters share. slots: those that draft a token."""
    decoder = drafter_layers(manifest, settings["num_layers"], "qwen3", settings["sliding_window"])
    decoder._attn_implementation = ATTENTION[device]
    return {
        "transformer_layer_config": decoder,
        "block_size": settings["block_size"],
        "mask_token_id": mask_token.settled(settings["mask_token_id"], manifest),
        "aux_hidden_state_layer_ids": [i + 1 for i in settings["layers"]["output_of"]],
        "speculators_config": proposal(algorithm, slots, verifier_of(manifest)),
    }


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


def states(
    model: DFlashDraftModel,
    aux: torch.Tensor,
    ids: torch.Tensor,
    documents: torch.Tensor,
    positions: torch.Tensor,
    anchors: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """What the drafter's head reads in every slot, the anchor's own included: [anchors, block, hidden].

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
    return model.norm(hidden).view(len(anchors), block, -1)


def head_logits(model: DFlashDraftModel, states: torch.Tensor) -> torch.Tensor:
    """lm_head of states [anchors, drafts, hidden]."""
    # a view of three dimensions would copy lm_head once per block
    return model.lm_head(states.flatten(0, 1)).unflatten(0, states.shape[:2])


def entry(drafter: DFlashDraftModel) -> nn.Module:
    """The module that the target's states enter: where their dtype is checked."""
    return drafter.fc


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
