"""Whether the loaded model's embedding, norm and head are the checkpoint's, to which drafts are scored."""

from pathlib import Path

import torch
from torch import nn

from draftmill.errors import DraftmillError
from draftmill.target_structure import final_norm, output_head


def check_loaded(model: nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Refuses a model whose embedding, norm or head is not the checkpoint's after loading.

    tensors: of head.safetensors at `path`. Raises DraftmillError.
    """
    modules = {
        "embed_tokens": model.get_input_embeddings(),
        "norm": final_norm(model),
        "lm_head": output_head(model),
    }
    for role, module in modules.items():
        for name, weight in module.named_parameters():
            stored = tensors.get(f"{role}.{name}")
            if stored is not None and not torch.equal(weight.to(stored.dtype).cpu(), stored):
                raise DraftmillError(
                    f"{path}: {role}.{name} of the checkpoint is not what the loaded model has; transformers "
                    "changes it while loading, so drafts would be scored against another head; this "
                    "family is not supported."
                )
