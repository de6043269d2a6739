"""What others published of tau: figures to stand beside one's own, each with the conditions it was measured under.

Names differ between papers, hub ids and quantised copies. Two names are the same target where the last part of the
hub id agrees after lower case, without a leading "meta-" and without trailing quantisation (-FP8, -AWQ, -W4A16,
-GGUF, .w4a16, ...) and chat suffixes (-Instruct, -Chat, -it, -hf), which papers leave out. What stands behind such a
suffix belongs to the name: Qwen3-4B-Instruct-2507 is another model than Qwen3-4B, and so is a -Base.
"""

import csv
import difflib
import re
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "resources" / "published_tau.tsv"
NUMBERS = ("tau", "speedup", "temperature")
COUNTS = ("draft_tokens", "block", "max_new_tokens")
WIDTH = r"(?:w\d+a\d+(?:-?fp8)?|\d+bit|int\d|[nm]?xfp\d|nvfp\d|fp\d+|bf16|q\d\w*)"
QUANTISED = rf"(?:quantized|dynamic|block|gguf|awq|gptq|bnb|mlx|exl\d|{WIDTH})"
SUFFIX = re.compile(rf"[-._](?:instruct|chat|it|hf|{QUANTISED})$")


def rows(target: str, algorithm: str | None = None) -> list[dict]:
    """The published rows of a target (a hub id, folder or bare name), of one algorithm or of all, as in the table.

    Numbers are numbers; what was not stated is None. tau counts the bonus token.
    """
    name = base_name(target)
    found = [row for row in table() if base_name(row["target"]) == name]
    return [row for row in found if algorithm in (None, row["algorithm"])]


def closest(target: str, algorithm: str) -> list[dict]:
    """Rows of another target, for one that nobody published figures of.

    Those of the target of the same family (the letters that a name begins with) whose name is most alike; where
    no family fits, the means over benchmarks of every target.
    """
    found = [row for row in table() if row["algorithm"] == algorithm]
    names = sorted({base_name(row["target"]) for row in found})
    family = [n for n in names if family_of(n) == family_of(base_name(target))]
    if not family:
        return [row for row in found if row["benchmark"] == "mean"]
    [nearest] = difflib.get_close_matches(base_name(target), family, n=1, cutoff=0.0)
    return [row for row in found if base_name(row["target"]) == nearest]


def family_of(name: str) -> str:
    return re.match(r"[a-z]*", name).group()


def table() -> list[dict]:
    with open(TABLE, encoding="utf-8", newline="") as file:
        return [typed(row) for row in csv.DictReader(file, delimiter="\t")]


def typed(row: dict[str, str]) -> dict:
    made: dict = {key: value or None for key, value in row.items()}
    for key in (*NUMBERS, *COUNTS):
        if made[key] is not None:
            made[key] = (int if key in COUNTS else float)(made[key])
    return made


def base_name(target: str) -> str:
    """A target's name without owner, quantisation and chat suffix."""
    name = target.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while SUFFIX.search(name):
        name = SUFFIX.sub("", name)
    return name
