"""What the report shows, collected from the run's files."""

import json
from pathlib import Path

import markupsafe

from draftmill import draft_vocab, job_times, side_by_side, tables
from draftmill.atomic import read_json
from draftmill.errors import DraftmillError
from draftmill.stage import Stage, combine

Json = dict


def collect(root: Path, logs: Path, stage: Stage) -> Json:
    """All values of the template.

    Raises DraftmillError where the results are not those that the run plans.
    """
    drafters, sources = stage.config["drafters"], stage.config["sources"]
    runs = [read_json(root / "drafters" / d / "run.json") | {"name": d} for d in drafters]
    stage.expect("drafters", root / "drafters", combine(r["fingerprint"] for r in runs))
    measured = [
        read_json(root / "acceptance" / d / f"{s}.json") | {"drafter_name": d, "source": s}
        for d in drafters
        for s in stage.config["tests"]
    ]
    found = combine(m["fingerprint"] for m in measured)
    stage.expect("acceptance", root / "acceptance", found)
    for run in runs:
        if run["name"] not in stage.config["trained"]:
            continue
        record = draft_vocab.read(root / "draft_vocab" / f"{run['name']}.safetensors")[2]
        run["coverage"] = record["coverage"]
    counts = dict(sources)
    gates = [gate_summary(root, c, s, counts[s]) for c, s in stage.config["captured"]]
    stage.expect("gates", root / "gates", combine(g["fingerprint"] for g in gates))
    leaks = read_json(root / "gates" / "leaks.json")
    stage.expect("leaks", root / "gates" / "leaks.json", leaks["fingerprint"])
    checks = [read_json(root / "gates/drafters" / f"{d}.json") | {"name": d} for d in drafters]
    found = combine(c["fingerprint"] for c in checks)
    stage.expect("checks", root / "gates/drafters", found)
    audits = {d: read_json(root / f"gates/audit/{d}.json") for d in stage.config["trained"]}
    found = combine(audit["fingerprint"] for audit in audits.values())
    stage.expect("audits", root / "gates" / "audit", found)
    target = read_json(root / "target" / "manifest.json")
    jobs = drafter_jobs(audits, runs, checks, measured)
    return {
        "target": target,
        "taus": [row for m in measured for row in tau_rows(m)],
        "side_by_side": side_by_side.sources(runs, measured),
        "imported": side_by_side.imported(runs),
        "published": side_by_side.published_beside(target["name"], runs),
        "published_digest": stage.config["published"],
        "measured": measured,
        "condition_keys": list(measured[0]["conditions"]),
        "positions": list(range(max(len(m["acceptance_per_position"]) for m in measured))),
        "trained": [run for run in runs if run["name"] in stage.config["trained"]],
        "gates": gates,
        "leaks": leaks,
        "checks": checks,
        "audits": audits,
        "sources": [source_summary(root, name, shards) for name, shards in sources],
        "ledger": ledger(root, target, gates, jobs),
        "timings": job_times.timings(logs, stage.config, runs),
        "loading": job_times.loading(logs, stage.config),
        "logs": logs,
        "figures": {n: inline_svg(root / f"figures/{n}.svg") for n in ("training", "acceptance")},
        "provenance": provenance(root, target, jobs),
        "versions": runs[0]["record"]["versions"],
    }


def tau_rows(measured: Json) -> list[Json]:
    """The row of a source, then those of its categories where it has several."""
    categories = measured["categories"] if len(measured["categories"]) > 1 else {}
    groups = {"all": measured} | {k: v for k, v in categories.items() if k != "all"}
    rows = []
    for category, group in groups.items():
        low, high = group["tau_pooled_interval"] or (None, None)
        keys = ("tau_pooled", "tau_mean_of_means", "responses", "steps", "repetition")
        rows.append(
            {k: group[k] for k in keys}
            | {"drafter": measured["drafter_name"], "source": measured["source"]}
            | {"category": category, "tau_low": low, "tau_high": high}
            | {"algorithm": measured["drafter"]["algorithm"]}
            | {"imported": "yes" if measured["imported"] else "no"}
            | {"interval": "–" if low is None else f"{low:.2f} to {high:.2f}"}
            | {"outside": group.get("out_of_draft_vocab")}
            | measured["conditions"]
            | {"fingerprint": measured["fingerprint"]}
        )
    return rows


def gate_summary(root: Path, capture: str, source: str, shards: int) -> Json:
    files = [root / "gates" / capture / source / f"{i:05d}.json" for i in range(shards)]
    found = [read_json(path) for path in files]
    rows = sum(f["rows"] for f in found)
    agreed = [f["agreement"] for f in found if f["agreement"] is not None]
    weighted = sum(f["agreement"] * f["rows"] for f in found if f["rows"])
    return {
        "capture": capture,
        "source": source,
        "shards": shards,
        "samples": sum(f["samples"] for f in found),
        "tokens": sum(f["tokens"] for f in found),
        "rows": rows,
        "agreement": weighted / rows if rows else None,
        "greedy": min((f["greedy"] for f in found if f["greedy"] is not None), default=None),
        "lowest": min(agreed, default=None),
        "dtypes": found[0]["record"]["dtypes"],
        "fingerprint": combine(f["fingerprint"] for f in found),
    }


def source_summary(root: Path, name: str, shards: int) -> Json:
    files = [root / "tokens" / name / f"{i:05d}.parquet" for i in range(shards)]
    records = [tables.record_of(path) for path in files]
    return {
        "name": name,
        "samples": sum(len(tables.read(path)) for path in files),
        "tokens": sum(r["tokens"] for r in records),
        "truncated": sum(r["truncated"] for r in records),
        "skipped": [reason for r in records for reason in r["skipped"]],
    }


def drafter_jobs(
    audits: dict[str, Json], runs: list[Json], checks: list[Json], measured: list[Json]
) -> list[tuple[str, str, Json]]:
    """Every job on a drafter: its name, its file below the run's folder, and what that holds."""
    jobs = [(f"audit_training, {d}", f"gates/audit/{d}.json", a) for d, a in audits.items()]
    for run in runs:
        name = run["name"]
        jobs.append((f"{run['record']['rule']}, {name}", f"drafters/{name}/run.json", run))
    for check in checks:
        name = check["name"]
        jobs.append((f"check_drafter, {name}", f"gates/drafters/{name}.json", check))
    for m in measured:
        name, source = m["drafter_name"], m["source"]
        file = f"acceptance/{name}/{source}.json"
        jobs.append((f"measure_acceptance, {name} on {source}", file, m))
    return jobs


def ledger(root: Path, target: Json, gates: list[Json], jobs: list[tuple[str, str, Json]]):
    """(stage, component, dtype) of all stages; of a source's shards, the first speaks."""
    stages = [("prepare_target", target["record"]["dtypes"])]
    for gate in gates:
        source, capture = gate["source"], gate["capture"]
        answers = root / "responses" / source / "00000.parquet"
        if answers.is_file():
            dtypes = tables.record_of(answers)["dtypes"]
            stages.append((f"generate_responses, {source}", dtypes))
        states = read_json(root / "hidden_states" / capture / source / "manifest.json")
        stages.append((f"extract_hidden_states, {source}", states["dtypes"]))
        stages.append((f"gate_hidden_states, {source}", gate["dtypes"]))
    stages += [(job, value["record"]["dtypes"]) for job, _, value in jobs]
    return [(stage, *item) for stage, dtypes in stages for item in dtypes.items()]


def inline_svg(path: Path) -> markupsafe.Markup:
    text = path.read_text(encoding="utf-8")
    if "<svg" not in text:
        raise DraftmillError(f"{path}: is no SVG; delete it and start Snakemake again.")
    return markupsafe.Markup(text[text.index("<svg") :])


def provenance(root: Path, target: Json, jobs: list[tuple[str, str, Json]]) -> list[Json]:
    rows = [("target/manifest.json", target), *((file, value) for _, file, value in jobs)]
    return [
        {
            "file": str(root / name),
            "fingerprint": value["fingerprint"],
            "code": json.loads(value["record"]["settings"])["code"],
            "settings": value["record"]["settings"],
        }
        for name, value in rows
    ]
