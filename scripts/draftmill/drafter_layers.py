"""The drafter's decoder layers: speculators' configuration of them for a target.

speculators copies sizes and rotary parameters from the target's configuration, whose names it expects to be
Llama's. Families that have no RMSNorm, no gated MLP or no rotary angles lack some; there Llama's defaults stand.
"""

import logging
import tempfile

from speculators.train.cli import create_transformer_layer_config
from transformers import LlamaConfig, PretrainedConfig

from draftmill import rotary
from draftmill.errors import DraftmillError
from draftmill.target_config import config_of, context_length, text_config

UNUSED_WINDOW = 2048  # where every layer is listed as full attention
HEAD_DIM = 64  # of a drafter for a target without attention heads of its own
# warns of partial rotary angles, which are left out below
logging.getLogger(create_transformer_layer_config.__module__).setLevel(logging.ERROR)
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def drafter_layers(
    manifest: dict, layers: int, kind: str, window: int | None = None
) -> PretrainedConfig:
    """A configuration of `layers` decoder layers with the target's sizes.

    kind: llama (EAGLE-3) or qwen3 (DFlash). window: of sliding attention in every layer; None for full
    attention in every layer.

    Raises DraftmillError where the target's own do not suit one.
    """
    try:
        return _made(manifest["checkpoint"], layers, kind, window, manifest["trust_remote_code"])
    except (AttributeError, TypeError):
        with tempfile.TemporaryDirectory() as folder:
            completed(text_config(config_of(manifest))).save_pretrained(folder)
            return _made(folder, layers, kind, window, False)
    except ValueError as error:
        raise DraftmillError(
            f"{manifest['checkpoint']}/config.json: no drafter can be shaped after it "
            f"({' '.join(str(error).split())[:200]}); this family is not supported for training."
        ) from None


def _made(
    folder: str, layers: int, kind: str, window: int | None, trust_remote_code: bool
) -> PretrainedConfig:
    made = create_transformer_layer_config(
        folder,
        layers,
        kind,
        None,
        window or UNUSED_WINDOW,
        [] if window else list(range(layers)),  # a layer not listed would silently slide
        mrope_full_head_hack=False,  # which refuses sections that do not fill a head
        trust_remote_code=trust_remote_code,
    )
    made.rope_parameters = rotary.plain(made.rope_parameters)
    return made


def completed(text: PretrainedConfig) -> LlamaConfig:
    """The target's sizes under Llama's names, with Llama's defaults for what it lacks."""
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or text.hidden_size % heads:  # none, or one number per layer
        heads = max(1, text.hidden_size // HEAD_DIM)
    shared = getattr(text, "num_key_value_heads", None)
    inner = getattr(text, "intermediate_size", None)
    rope = getattr(text, "rope_parameters", None)
    epsilon = next((e for key in EPSILONS if (e := getattr(text, key, None))), 1e-6)
    found = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": inner if isinstance(inner, int) else 4 * text.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": shared if isinstance(shared, int) and shared else heads,
        "rms_norm_eps": epsilon,
        "max_position_embeddings": context_length(text) or LlamaConfig().max_position_embeddings,
    }
    if isinstance(rope, dict) and "rope_theta" in rope:
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return LlamaConfig(**found)
