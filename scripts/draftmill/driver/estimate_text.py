"""An estimate as aligned tables for people."""

from collections.abc import Callable, Iterator

from draftmill.dtype_policy import BYTES
from draftmill.job_times import LIMIT

STAGES = {"extract_hidden_states": "extraction", "gate_hidden_states": "gate"}


def text_of(found: dict) -> str:
    """The whole estimate as text."""
    return "\n".join(lines_of(found))


def lines_of(found: dict) -> Iterator[str]:
    target, disk = found["target"], found["disk"]
    yield f"{found['run']}: {target['architecture']} ({target['config']})"
    yield ""
    yield from table(target_rows(found))
    yield ""
    yield from table(source_rows(found))
    yield ""
    yield "memory, per process"
    yield from table(memory_rows(found))
    yield (
        f"backend auto: resident where {bytes_text(found['memory']['auto is resident from'])} of memory are "
        "free (of the GPUs, or of the machine), else streamed"
    )
    yield ""
    rate = found["loading"]["tflops"]
    yield f"operations, and time at {rate:g} TFLOP/s (generation takes longer: it waits for memory)"
    yield from table(operation_rows(found))
    if None in found["drafters"].values():
        yield "  (acceptance without the drafters whose size is not known here)"
    yield ""
    yield from loading_lines(found["loading"], found["checkpoint"])
    yield ""
    yield "default layers of this target (hidden_states.captures)"
    for name, layers in found["layers"].items():
        yield f"    {name}: {{output_of: {layers}}}"
    yield ""
    peak = "" if disk["kept"] else ", before it deletes states that are no longer needed"
    yield f"the run takes {bytes_text(disk['total'])} on disk, {bytes_text(disk['present'])} of it there already{peak}"
    yield "  (states, target and drafters; prompt, response and token tables are not counted)"
    yield f"a job of streamed extraction sets up to {bytes_text(disk['spilled'])} aside there while it runs"
    yield f"free in the results folder: {bytes_text(disk['free'])}"
    if disk["short"]:
        yield (
            f"WARNING: {bytes_text(disk['short'])} are missing; lower the sources' limit, name fewer layers, "
            "set hidden_states.keep_states: false, or give results/ a larger disk."
        )
    yield ""
    yield from (f"{name} = {formula}" for name, formula in found["formulas"].items())
    if any(source["rough"] for source in found["sources"].values()):
        yield (
            "Rough figures: 'at most' takes every answer at responses.max_new_tokens; 'assumed' takes "
            "--prompt-tokens and --answer-tokens."
        )


def target_rows(found: dict) -> list[list[str]]:
    target = found["target"]
    size = BYTES[target["dtype"]]

    def row(name: str, parameters: float, note: str = "") -> list[str]:
        return [name, count_text(parameters), bytes_text(parameters * size), note]

    share = target["experts"]
    return [
        row("parameters", target["total"], f"in {target['dtype']}"),
        row("  embedding", target["embedding"], f"{target['vocab']} x {target['hidden']}"),
        row("  decoder layers", target["decoder_layers"], f"{target['layers']} layers"),
        row("  largest layer", target["largest_layer"]),
        row("  head", target["head"], "" if target["head"] else "tied to the embedding"),
        row("active per token", target["active"], share),
        ["context", str(target["context"] or "unknown"), "", "tokens"],
        *(drafter_row(row, name, drafter) for name, drafter in found["drafters"].items()),
    ]


def drafter_row(row: Callable, name: str, size: dict | None) -> list[str]:
    if size is None:
        return [
            f"drafter {name}",
            "?",
            "",
            "not known here: its config.json is not in a local folder",
        ]
    return row(f"drafter {name}", size["trained"] + size["frozen"])


def source_rows(found: dict) -> list[list[str]]:
    captures = sorted({c for source in found["sources"].values() for c in source["states"]})
    rows = [["source", "rows", "shards", "tokens", *(f"states {c}" for c in captures), "basis"]]
    for name, source in found["sources"].items():
        states = [bytes_text(source["states"].get(c, 0)) for c in captures]
        figures = [f"{source['rows']:,}", f"{source['shards']:,}", f"{source['tokens']:,}"]
        rows.append([name, *figures, *states, source["basis"]])
    return rows


def memory_rows(found: dict) -> list[list[str]]:
    memory, rules = found["memory"], found["loading"]["rules"]
    rows = [["  resident extraction", memory["resident extraction"], ""]]
    for rule, held in memory["streamed"].items():
        job = f"shards_per_job {rules[rule]['shards_per_job']}"
        rows += [
            [f"  streamed {STAGES[rule]}", held["bytes"], job],
            ["    states in flight", held["states in flight"], "of it"],
        ]
        if held["attention masks"]:
            rows.append(["    attention masks", held["attention masks"], "of it, at most"])
    for name, value in memory["training"].items():
        blocks = memory["blocks of a row"].get(name)
        note = f"{blocks:,} blocks in a packed row" if blocks else ""
        rows.append([f"  training {name}", value, note])
    return [[name, bytes_text(value), note] for name, value, note in rows]


def operation_rows(found: dict) -> list[list[str]]:
    rate = found["loading"]["tflops"] * 1e12
    operations = found["operations"].items()
    return [
        [f"  {name}", f"{value:.2e}", time_text(value / rate)]
        for name, value in operations
        if value
    ]


def loading_lines(loading: dict, checkpoint: dict) -> Iterator[str]:
    yield (
        f"loading the target: {bytes_text(checkpoint['bytes'])} ({checkpoint['basis']}) at "
        f"{loading['read_gb_per_second']:g} GB/s, {time_text(loading['seconds'])} a job"
    )
    yield from table(
        [
            [
                f"  {STAGES[rule]}",
                f"{found['share']:.0%}",
                f"of its time; shards_per_job {found['shards_per_job']}, "
                f"{time_text(found['computing'])} of computing",
            ]
            for rule, found in loading["rules"].items()
        ]
    )
    for rule, found in loading["rules"].items():
        if found["share"] > LIMIT:
            yield warning(rule, found)


def warning(rule: str, found: dict) -> str:
    above = f"WARNING: {STAGES[rule]} above {LIMIT:.0%}"
    if found["enough"]:
        return (
            f"{above}; with {found['enough']} shards a job it is below, and a streamed job takes "
            f"{bytes_text(found['enough_bytes'])}: --set-resources {rule}:shards_per_job={found['enough']} (or in "
            "a profile, see profiles/large-target), or a larger shard_size."
        )
    return (
        f"{above}, and {found['best_share']:.1%} even with {found['most']} shards in one job; the data are few "
        "for this target: add rows, take a larger shard_size, or put the checkpoint on a faster disk."
    )


def table(rows: list[list[str]]) -> Iterator[str]:
    """Rows of equal length with aligned columns: figures to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def bytes_text(value: float) -> str:
    return scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(value: float) -> str:
    return scaled(value, ("", "k", "M", "G", "T"))


def scaled(value: float, units: tuple[str, ...]) -> str:
    """Three significant figures with a decimal unit: 35.2 TB."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if abs(value) >= 99.95 or power == 0 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {units[power]}".rstrip()


def time_text(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.2g} s"
