"""What speculators' drafters have in common, whatever the algorithm."""

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import nn

from draftmill.dtype_policy import cast


def proposal(algorithm: str, tokens: int, verifier: VerifierConfig) -> SpeculatorsConfig:
    """The drafter proposes `tokens` greedy tokens to this target."""
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=verifier,
    )


def verifier_of(manifest: dict) -> VerifierConfig:
    """speculators' description of a target that is here, by its name instead of its folder's."""
    verifier = VerifierConfig.from_pretrained(manifest["checkpoint"])
    verifier.name_or_path = manifest["name"]
    return verifier


def empty(config: SpeculatorModelConfig) -> nn.Module:
    """The model of a configuration without speculators' own copy of the target's norm and head: it knows neither
    softcap, scale nor bias, and not every family's norm. Its class must have been imported."""
    verifier = config.speculators_config.verifier
    name, verifier.name_or_path = verifier.name_or_path, None  # or it is looked up for its norm
    try:
        model = SpeculatorModel.registered_model_class_from_config(config)(config)
    finally:
        verifier.name_or_path = name
    model.verifier_norm = nn.Identity()
    model.verifier_lm_head = nn.Identity()
    return model


def new_drafter(
    config: SpeculatorModelConfig,
    head: dict[str, torch.Tensor],
    t2d: torch.Tensor,
    d2t: torch.Tensor,
    dtype: torch.dtype,
) -> nn.Module:
    """A drafter in `dtype` with random layers and the target's embedding and lm_head rows, both frozen."""
    model = empty(config)
    model.load_vocab_mappings(t2d, d2t)
    kept = t2d if model.use_draft_vocab else slice(None)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(head["embed_tokens.weight"])
        model.lm_head.weight.copy_(head["lm_head.weight"][kept])
    for frozen in (model.embed_tokens, model.lm_head):
        frozen.weight.requires_grad_(False)
    return cast(model, dtype)
