"""How much of a job's time goes into loading the target: written beside its log (job_times.py warns)."""

from pathlib import Path

from draftmill.atomic import write_json


def write(
    path: Path | None, loading: float, total: float, backend: str, outputs: list[Path]
) -> None:
    """Seconds of loading and of the whole job, to `path` if given, and to the log.

    outputs: one file per shard, .../{capture}/{source}/{shard}; the report finds the job by them.
    """
    share = loading / total if total else 0.0
    print(f"loading the target: {loading:.1f} of {total:.1f} s ({share:.0%})", flush=True)
    if path is not None:
        shards = ["/".join(output.with_suffix("").parts[-3:]) for output in outputs]
        figures = {"loading": loading, "total": total, "backend": backend}
        write_json(path, figures | {"shards": shards})
