"""report.html, which opens without a network, and summary.tsv."""

import argparse
import csv
import io
from pathlib import Path

import jinja2

from draftmill import report_data
from draftmill.atomic import write_text
from draftmill.stage import Stage

TEMPLATE = Path(__file__).resolve().parents[1] / "resources" / "report.html.jinja"
SUMMARY = (
    "drafter",
    "source",
    "category",
    "tau_pooled",
    "tau_low",
    "tau_high",
    "tau_mean_of_means",
    "responses",
    "steps",
    "repetition",
    "outside",
    "algorithm",
    "imported",
    "drafting",
    "draft_tokens",
    "temperature",
    "max_new_tokens",
    "chat_template_kwargs",
    "dtype",
    "draft_vocab_size",
    "fingerprint",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--root", required=True, type=Path, help="results/{run}")
    parser.add_argument("--logs", required=True, type=Path, help="logs/{run}")
    parser.add_argument("--html", required=True, type=Path)
    parser.add_argument("--summary", required=True, type=Path)
    options = parser.parse_args()
    write(options.settings, options.root, options.logs, options.html, options.summary)


def write(stage: Stage, root: Path, logs: Path, page: Path, table: Path) -> None:
    data = report_data.collect(root, logs, stage)
    write_text(page, html(data, stage))
    write_text(table, summary(data["taus"]))
    for row in data["taus"]:
        if row["category"] == "all":
            print(f"tau of {row['drafter']} on {row['source']}: {row['tau_pooled']:.3f} (pooled)")


def html(data: dict, stage: Stage) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["number"] = lambda x: "–" if x is None else f"{x:.3f}"
    environment.filters["stated"] = lambda x: "–" if x is None else x
    environment.filters["percent"] = lambda x: "–" if x is None else f"{x:.1%}"
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    title, run = stage.config["title"], stage.config["run"]
    return template.render(data, title=title, run=run, fingerprint=stage.fingerprint)


def summary(rows: list[dict]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(
        out, SUMMARY, delimiter="\t", lineterminator="\n", extrasaction="ignore"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


if __name__ == "__main__":
    main()
