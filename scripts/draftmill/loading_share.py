"""How much of a job's time goes into loading the target: written beside its log, warned of when large."""

from pathlib import Path

from draftmill.atomic import write_json

LIMIT = 0.10  # share of a job's time above which a warning says what to change


def write(
    path: Path | None, loading: float, total: float, backend: str, outputs: list[Path]
) -> None:
    """Seconds of loading and of the whole job, to `path` if given, and to the log.

    outputs: one file per shard, .../{capture}/{source}/{shard}; the report finds the job by them.
    """
    share = loading / total if total else 0.0
    print(f"loading the target: {loading:.1f} of {total:.1f} s ({share:.0%})", flush=True)
    if share > LIMIT:
        print(warning(share), flush=True)
    if path is not None:
        shards = ["/".join(output.with_suffix("").parts[-3:]) for output in outputs]
        figures = {"loading": loading, "total": total, "backend": backend}
        write_json(path, figures | {"shards": shards})


def warning(share: float, rule: str = "this rule") -> str:
    return (
        f"warning: {share:.0%} of the time went into loading the target (more than {LIMIT:.0%}); raise the "
        f"resource shards_per_job of {rule} (in a profile or by --set-resources), or the sources' "
        "shard_size."
    )
