"""A head of its own or the embedding: what config.json says, at the top and nested, against what is on disk."""

from collections.abc import Callable

import pytest
import torch

from edited_checkpoint import Tensors

HEADS = {"kimi_k25": "language_model.lm_head.weight", "qwen3_5": "lm_head.weight"}


def flagged(top: bool | None, text: bool | None) -> Callable[[dict], None]:
    def change(config: dict) -> None:
        for place, flag in ((config, top), (config["text_config"], text)):
            place.pop("tie_word_embeddings", None)
            if flag is not None:
                place["tie_word_embeddings"] = flag

    return change


FLAGS = [(top, text) for top in (True, False, None) for text in (True, False, None)]


@pytest.mark.parametrize("family_name", HEADS)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_head_of_its_own_is_taken_unless_a_flag_says_tied(edited, family_name, flags):
    checkpoint = edited(family_name).config(flagged(*flags))
    if True in flags:
        assert "lm_head is tied to the embedding" in checkpoint.refused()
        return
    road = checkpoint.road()
    road.prepare_target()
    tensors = checkpoint.head(road)
    assert not torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])


@pytest.mark.parametrize("family_name", HEADS)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_missing_head_is_the_embedding_only_where_nothing_says_otherwise(
    edited, family_name, flags
):
    checkpoint = edited(family_name).config(flagged(*flags)).without(r"lm_head\.weight")
    # transformers goes by the wrapper's flag for Kimi, which ties by default, and by the text's for Qwen3.5
    tied = flags[0] is not False if family_name == "kimi_k25" else flags[1] is True
    if not tied or (False in flags and True not in flags):
        assert (
            "holds no lm_head.weight, and config.json says that it is not tied"
            in checkpoint.refused()
        )
        return
    road = checkpoint.road()
    road.prepare_target()
    tensors = checkpoint.head(road)
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])


@pytest.mark.parametrize("family_name", HEADS)
def test_a_tied_flag_beside_an_equal_head_is_no_contradiction(edited, family_name):
    def equal(tensors: Tensors) -> None:
        (embedding,) = [key for key in tensors if key.endswith("embed_tokens.weight")]
        tensors[HEADS[family_name]] = tensors[embedding].clone()

    checkpoint = edited(family_name).config(flagged(True, True)).tensors(equal)
    road = checkpoint.road()
    road.prepare_target()
    tensors = checkpoint.head(road)
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])
