"""Rotary angles of a drafter: its saved parameters say what its layers compute, and nothing else."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length
ROPE_KEYS = {
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "truncate"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
}
# multimodal positions; all three of a text token are equal, which is the plain angle
ROPE_OF_IMAGES = {"mrope_section", "mrope_interleaved"}
DEFAULT_THETA = 10_000.0


def plain(target: dict | None) -> dict:
    """rope_parameters of a drafter after those of its target: angles over the whole head.

    Left out is what Llama's and Qwen3's layers ignore and an engine might not: sections of multimodal positions
    and a part of the head that is turned. Angles that change with the length of the text become plain ones,
    since one pass over a text would have others than drafting does.
    """
    given = target or {}
    base = {"rope_type": "default", "rope_theta": float(given.get("rope_theta") or DEFAULT_THETA)}
    if given.get("rope_type") not in ROPE_TYPES[1:]:
        return base
    kept = {k: v for k, v in given.items() if k in ROPE_KEYS and v is not None}
    return kept | base | {"rope_type": given["rope_type"]}
