"""The gate against duplicates and leaks: no prompt may stand in sources of two roles."""

import argparse
from collections import defaultdict
from pathlib import Path

from draftmill import tables
from draftmill.atomic import write_json
from draftmill.errors import DraftmillError
from draftmill.stage import Stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--prompts", required=True, type=Path, help="the folder of all prompts")
    parser.add_argument("--sources", required=True, nargs="+", help="all sources, as NAME:SHARDS")
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    check(options.settings, options.prompts, options.sources, options.output)


def check(stage: Stage, prompts: Path, sources: list[str], output: Path) -> None:
    roles = stage.config["roles"]
    seen: dict[str, list[tuple[str, int]]] = defaultdict(list)
    counts = dict.fromkeys(roles, 0)
    for shards in sources:
        files, combined = tables.of_source(prompts, shards)
        source = files[0].parent.name
        stage.expect(source, prompts / source, combined)
        for path in files:
            for row in tables.read(path):
                seen[row["key"]].append((source, row["row"]))
                counts[source] += 1
    duplicates = {key: places for key, places in seen.items() if len(places) > 1}
    leaks = [p for p in duplicates.values() if len({roles[source] for source, _ in p}) > 1]
    if leaks:
        raise DraftmillError(
            f"leak: {len(leaks)} prompts stand in sources of different roles, first "
            f"{places_text(leaks[0])}; a drafter must not be measured on what it was trained on; "
            "remove them from one side."
        )
    if duplicates and stage.config["duplicates"] == "stop":
        raise DraftmillError(
            f"duplicates: {len(duplicates)} prompts stand more than once, first "
            f"{places_text(next(iter(duplicates.values())))}; remove them, or set leaks.duplicates: "
            "report."
        )
    found = {"prompts": counts, "duplicates": len(duplicates), "leaks": 0}
    write_json(output, found | {"record": stage.record(), "fingerprint": stage.fingerprint})


def places_text(places: list[tuple[str, int]]) -> str:
    return " and ".join(f"source '{source}' row {row + 1}" for source, row in places[:3])


if __name__ == "__main__":
    main()
