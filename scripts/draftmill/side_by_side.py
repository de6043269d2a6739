"""Drafters side by side: those of a run, trained or imported, and apart from them what others published."""

from draftmill import published

Json = dict
STATED = ("temperature", "max_new_tokens", "longest_response", "chat_template_kwargs", "dtype")


def sources(runs: list[Json], measured: list[Json]) -> list[Json]:
    """Per test source, in the order of measurement: `source`, `conditions` that all its rows share, and a row per drafter.

    runs: the drafters' run.json, each with its `name`. measured: acceptance files, each with `drafter_name` and
    `source`.
    """
    by_name = {run["name"]: run for run in runs}
    tables: dict[str, Json] = {}
    for found in measured:
        conditions = {key: found["conditions"][key] for key in STATED}
        table = tables.setdefault(found["source"], {"source": found["source"], "rows": []})
        table["rows"].append(
            row(by_name[found["drafter_name"]], found) | {"conditions": conditions}
        )
    return list(tables.values())


def row(run: Json, found: Json) -> Json:
    """What one drafter is and reached on one source."""
    conditions = found["conditions"]
    low, high = found["tau_pooled_interval"] or (None, None)
    return {
        "drafter": run["name"],
        "origin": origin(run),
        "algorithm": run["algorithm"],
        "drafting": drafting(conditions),
        "layers": run["layers"]["output_of"],
        "draft_vocab_size": conditions["draft_vocab_size"],
        "tau_pooled": found["tau_pooled"],
        "interval": "–" if low is None else f"{low:.2f} to {high:.2f}",
        "tau_mean_of_means": found["tau_mean_of_means"],
        "positions": found["acceptance_per_position"],
        "responses": found["responses"],
        "steps": found["steps"],
        "repetition": found["repetition"],
        "outside": found["out_of_draft_vocab"],
        "fingerprint": found["fingerprint"],
    }


def origin(run: Json) -> str:
    """Where a drafter comes from."""
    imported = run.get("imported")
    if imported is None:
        return "trained here"
    place = imported["path"] or f"{imported['hub']} at {imported['revision'][:12]}"
    return f"imported from {place} ({imported['format']})"


def drafting(conditions: Json) -> str:
    """How it drafts: a block counts its anchor, a chain does not."""
    tokens = conditions["draft_tokens"]
    if conditions["drafting"] == "block":
        return f"block of {tokens + 1}: {tokens} draft tokens"
    return f"chain of {tokens} draft tokens"


def imported(runs: list[Json]) -> list[Json]:
    """What is known of the drafters that others trained: place, format, digests of the files, remarks."""
    return [
        run["imported"] | {"drafter": run["name"], "origin": origin(run)}
        for run in runs
        if run.get("imported")
    ]


def published_beside(target: str, runs: list[Json]) -> list[Json]:
    """Per algorithm of the run: the published rows of its target, or else the closest (see published.closest)."""
    tables = []
    for algorithm in sorted({run["algorithm"] for run in runs}):
        rows = published.rows(target, algorithm)
        same = bool(rows)
        rows = rows or published.closest(target, algorithm)
        tables.append({"algorithm": algorithm, "same_target": same, "rows": rows})
    return tables
