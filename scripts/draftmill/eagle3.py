"""EAGLE-3: speculators' drafter and loss, with the target's own head in place of its copy of one.

Conventions met here: our layer i is the OUTPUT of decoder layer i; speculators' id is the index into
`hidden_states`, so the INPUT of that layer: one higher. A sample (x, g, y, l) of ids, aux states, last
states and loss mask is shifted to (x[1:], g[:-1], y[1:], l[1:]), positions from 1 (speculators,
models/eagle3/data.py): row j holds token j+1 with the state of token j, and predicts token j+2.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import nn
from torch.nn import functional

from draftmill import draft_vocab
from draftmill.drafter_layers import drafter_layers
from draftmill.dtype_policy import cast
from draftmill.errors import DraftmillError, damaged
from draftmill.target_head import TargetHead

ATTENTION = {"cpu": "sdpa", "cuda": "simple_flex_attention"}  # flex has no backward on a CPU
FLEX_BLOCK = 128  # flex attention's masks are made of whole blocks


def config_of(settings: dict, manifest: dict, device: str) -> Eagle3SpeculatorConfig:
    """speculators' configuration of a new drafter for this target."""
    decoder = drafter_layers(manifest, settings["num_layers"])
    decoder._attn_implementation = ATTENTION[device]
    verifier = VerifierConfig.from_pretrained(manifest["checkpoint"])
    verifier.name_or_path = manifest["name"]
    return Eagle3SpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=settings["draft_vocab_size"],
        norm_before_residual=settings["norm_before_residual"],
        norm_before_fc=settings["norm_before_fc"],
        eagle_aux_hidden_state_layer_ids=[i + 1 for i in settings["layers"]["output_of"]],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=settings["ttt_steps"])],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )


def new_drafter(
    config: Eagle3SpeculatorConfig,
    head: dict[str, torch.Tensor],
    t2d: torch.Tensor,
    d2t: torch.Tensor,
    dtype: torch.dtype,
) -> Eagle3DraftModel:
    """A drafter with random layers and the target's embedding and lm_head rows, both frozen."""
    check_full_attention(config)
    model = without_verifier(Eagle3DraftModel(config))
    model.load_vocab_mappings(t2d, d2t)
    kept = t2d if model.use_draft_vocab else slice(None)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(head["embed_tokens.weight"])
        model.lm_head.weight.copy_(head["lm_head.weight"][kept])
    for frozen in (model.embed_tokens, model.lm_head):
        frozen.weight.requires_grad_(False)
    return cast(model, dtype)


def check_full_attention(config: Eagle3SpeculatorConfig) -> None:
    kinds = config.transformer_layer_config.layer_types or ["full_attention"]
    if set(kinds) != {"full_attention"}:
        raise DraftmillError(
            f"drafter: its layers are {', '.join(sorted(set(kinds)))}, expected full_attention in every "
            "layer; a sliding window of 0 trains without an error and costs a fifth of tau."
        )


def without_verifier(model: Eagle3DraftModel) -> Eagle3DraftModel:
    """Takes out speculators' own copy of the target's norm and head: it knows neither softcap, scale
    nor bias, and not every family's norm."""
    model.verifier_norm = nn.Identity()
    model.verifier_lm_head = nn.Identity()
    return model


class WithTargets(nn.Module):
    """A drafter whose training targets come from the target's own head."""

    def __init__(self, drafter: Eagle3DraftModel, head: TargetHead, settings: dict):
        super().__init__()
        self.drafter = drafter
        object.__setattr__(self, "head", head)  # not a submodule: never trained, saved or cast
        # losses, accuracies and their reductions in fp32, whatever the weights are
        drafter.lm_head.register_forward_hook(lambda module, args, logits: logits.float())
        self.options = {
            "ttt_steps": settings["ttt_steps"],
            "ttt_step_loss_decay": settings["training"]["ttt_loss_decay"],
            "loss_config": resolve_loss_config(settings["training"]["loss"], "eager"),
        }

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        """Loss (fp32 scalar) and speculators' metrics of a packed batch (see packing.pack)."""
        with torch.no_grad():
            targets = self.head(batch["last"])
        _, loss, metrics = self.drafter(
            hidden_states=batch["aux"],
            input_ids=batch["input_ids"],
            document_ids=batch["document_ids"],
            loss_mask=batch["loss_mask"],
            position_ids=batch["position_ids"],
            # passed through the identities above, so these are the target's logits, not states
            verifier_last_hidden_states=targets,
            **self.options,
        )
        return loss, metrics


def shifted(sample: dict[str, torch.Tensor], ttt_steps: int) -> dict[str, torch.Tensor]:
    """A sample as EAGLE-3 sees it: (x[1:], g[:-1], y[1:], l[1:]), positions from 1.

    The first ttt_steps - 1 rows carry no loss: in a pack, the last rows of the sample before are scored
    against them at the later steps.
    """
    tokens = len(sample["input_ids"])
    loss_mask = sample["loss_mask"][1:].clone()
    loss_mask[: ttt_steps - 1] = False
    return {
        "input_ids": sample["input_ids"][1:],
        "aux": sample["aux"][:-1],
        "last": sample["last"][1:],
        "loss_mask": loss_mask,
        "position_ids": torch.arange(1, tokens),
    }


def load(folder: Path, device: str) -> Eagle3DraftModel:
    """An exported drafter, every weight from its file, in the dtypes of that file.

    Raises DraftmillError where keys are missing or left over.
    """
    try:
        config = SpeculatorModelConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise damaged(folder / "config.json", error) from None
    config.transformer_layer_config._attn_implementation = ATTENTION[device]
    check_full_attention(config)
    model = without_verifier(Eagle3DraftModel(config))
    try:
        tensors = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise damaged(folder / "model.safetensors", error) from None
    try:
        found = model.load_state_dict(tensors, strict=False, assign=True)
        wrong = [*found.missing_keys, *found.unexpected_keys][:3]
    except RuntimeError as error:  # other shapes
        wrong = str(error).splitlines()[-1:]
    if wrong:
        raise DraftmillError(
            f"{folder}/model.safetensors: does not fit its config.json ({', '.join(wrong).strip()}); delete it "
            "and start Snakemake again to train anew."
        )
    if model.d2t is not None:
        draft_vocab.check(model.t2d.bool(), model.d2t, f"{folder}/model.safetensors")
    return model.eval().to(device)


def check_target(model: Eagle3DraftModel, manifest: dict, layers: list[int], folder: Path) -> None:
    """Refuses a drafter that was made for another target, whatever fingerprints it carries.

    layers: output_of of the states it is to read. Raises DraftmillError that names both.
    """
    config = model.config
    verifier = config.speculators_config.verifier
    known = manifest["vocab_size"] if model.t2d is None else len(model.t2d)
    pairs = {
        "hidden size": (config.transformer_layer_config.hidden_size, manifest["hidden_size"]),
        "embedded tokens": (model.embed_tokens.weight.shape[0], manifest["embedding_rows"]),
        "vocabulary": (known, manifest["vocab_size"]),
        "layers (ids of speculators)": (
            config.eagle_aux_hidden_state_layer_ids,
            [layer + 1 for layer in layers],
        ),
        "name": (verifier.name_or_path, manifest["name"]),
        "architectures": (verifier.architectures, manifest["architectures"]),
    }
    for what, (found, expected) in pairs.items():
        if found != expected:
            raise DraftmillError(
                f"{folder}/config.json: this drafter was made for another target: {what} {found}, but the run's "
                f"target {manifest['name']} has {expected}; delete the drafter and start Snakemake again to "
                "train one for this target."
            )


@torch.inference_mode()
def drafts(model: Eagle3DraftModel, sample: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """What the drafter would propose at every position of a sample, in one teacher-forced pass.

    sample: input_ids [tokens], aux [tokens, layers * hidden].
    Returns int64 [tokens - 1, steps]: row j, with token j+1 the last one known, holds the target
    vocabulary's ids of the drafts for tokens j+2, j+3, ...

    A draft chain's first mismatch ends it, so feeding the text's own tokens in place of the drafts gives
    the accepted prefix exactly.
    """
    ids, aux = sample["input_ids"][1:], sample["aux"][:-1]
    device, count = model.fc.weight.device, len(ids)
    padding = -count % FLEX_BLOCK if device.type == "cuda" else 0
    documents = torch.zeros(count, dtype=torch.long)
    proposals = model(
        hidden_states=functional.pad(aux, (0, 0, 0, padding))[None].to(device),
        input_ids=functional.pad(ids, (0, padding))[None].to(device),
        document_ids=functional.pad(documents, (0, padding), value=-1)[None].to(device),
        position_ids=torch.arange(1, count + padding + 1, device=device)[None],
        ttt_steps=steps,
    )
    found = torch.stack([p[0, :count] for p in proposals], dim=1)
    return (found if model.d2t is None else found + model.d2t[found]).cpu()
