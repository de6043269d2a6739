"""How long a run's jobs took, and how much of it went into loading the target.

Read from what the jobs leave beside their logs. Files of jobs that the run no longer has (removed sources,
drafters, captures, shards) are left out.
"""

import csv
from pathlib import Path

from draftmill.atomic import read_json

Json = dict
LIMIT = 0.10  # share of loading in the jobs' time above which a warning says what to change
LOADS_TARGET = ("extract_hidden_states", "gate_hidden_states")  # whose jobs may take several shards


def timings(logs: Path, settings: Json, runs: list[Json]) -> list[Json]:
    """Per rule: jobs, seconds of wall and CPU time, highest memory in MB, in the order of the stages.

    settings: the report's own. runs: the drafters' run.json, each with its `name`. A rule without a benchmark
    (results that were copied here without their logs) has no row.
    """
    found = []
    for rule, names in jobs_of(logs, settings, runs).items():
        paths = [logs / rule / f"{name}.tsv" for name in names]
        rows = [row for path in paths if path.is_file() for row in benchmark(path)]
        if rows:
            found.append(
                {
                    "rule": rule,
                    "jobs": len(rows),
                    "wall": sum(number(r["s"]) for r in rows),
                    "cpu": sum(number(r["cpu_time"]) for r in rows),
                    "memory": max(number(r["max_rss"]) for r in rows),
                }
            )
    return found


def jobs_of(logs: Path, settings: Json, runs: list[Json]) -> dict[str, list[str]]:
    """rule -> the names of its jobs' logs; the report itself is not done yet."""
    sources, tests = dict(settings["sources"]), settings["tests"]

    def shards_of(names) -> list[str]:
        return [f"{name}.{i:05d}" for name in names for i in range(sources[name])]

    jobs = {
        "prepare_target": ["all"],
        "prepare_prompts": shards_of(sources),
        "check_leaks": ["all"],
        "generate_responses": shards_of(settings["generated"]),
        "tokenize_conversations": shards_of(sources),
    }
    for rule in LOADS_TARGET:
        jobs[rule] = [job["name"] for job in loading_jobs(logs / rule, settings)]
    jobs["index_hidden_states"] = [f"{c}.{s}" for c, s in settings["captured"]]
    for rule in ("build_draft_vocab", "audit_training"):
        jobs[rule] = list(settings["trained"])
    for run in runs:
        jobs.setdefault(run["record"]["rule"], []).append(run["name"])
    jobs["check_drafter"] = [run["name"] for run in runs]
    jobs["measure_acceptance"] = [f"{run['name']}.{test}" for run in runs for test in tests]
    return jobs | {"plot": ["all"]}


def benchmark(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def number(text: str) -> float:
    """A benchmark's number; a job shorter than its first sample has NA."""
    return 0.0 if text in ("NA", "-", "") else float(text)


def loading(logs: Path, settings: Json) -> list[Json]:
    """Per rule that loads the target: jobs, seconds of loading, their share of the jobs' time, the backends,
    and the sentence that warns of a large share (else None)."""
    found = []
    for rule in LOADS_TARGET:
        jobs = loading_jobs(logs / rule, settings)
        if not jobs:
            continue
        seconds, total = (sum(job[key] for job in jobs) for key in ("loading", "total"))
        share = seconds / total if total else 0.0
        found.append(
            {
                "rule": rule,
                "jobs": len(jobs),
                "seconds": seconds,
                "share": share,
                "backend": ", ".join(sorted({job["backend"] for job in jobs})),
                "warning": warning(rule, share) if share > LIMIT else None,
            }
        )
    return found


def warnings(logs: str, captured: list, sources: list) -> list[str]:
    """The sentences for the end of a run. captured: capture and source of all hidden states. sources: [name,
    number of shards] of each."""
    rows = loading(Path(logs), {"captured": captured, "sources": sources})
    return [row["warning"] for row in rows if row["warning"]]


def warning(rule: str, share: float) -> str:
    return (
        f"warning: {share:.0%} of the time of {rule} went into loading the target (more than {LIMIT:.0%}); raise "
        f"its resource shards_per_job (in a profile, or --set-resources {rule}:shards_per_job=N), or the "
        "sources' shard_size."
    )


def loading_jobs(folder: Path, settings: Json) -> list[Json]:
    """The loading files of the jobs behind the run's shards, each with its `name`; where several jobs made
    one shard, the last counts."""
    shards = {
        f"{capture}/{source}/{i:05d}"
        for capture, source in settings["captured"]
        for i in range(dict(settings["sources"])[source])
    }
    last: dict[str, Json] = {}
    # Snakemake makes log files when a job starts: an empty one is of a job that was killed
    written = [p for p in folder.glob("*.loading.json") if p.stat().st_size]
    for path in sorted(written, key=lambda p: p.stat().st_mtime_ns):
        job = read_json(path) | {"name": path.name.removesuffix(".loading.json")}
        last |= dict.fromkeys(shards.intersection(job["shards"]), job)
    return [job for _, job in sorted({job["name"]: job for job in last.values()}.items())]
