"""What a run will take, before it runs: tokens, bytes of hidden states, memory, operations, loading time.

    python scripts/plan.py --configfile configs/kimi-k2.5-eagle3.yaml

Reads the configuration, the target's config.json and, where they are at hand, tokenizer and rows; no weights,
and nothing is downloaded.
"""

import argparse
import json
import sys
from pathlib import Path

import yaml

from draftmill.driver.config import completed
from draftmill.driver.estimate import Options, estimate
from draftmill.driver.estimate_text import text_of
from draftmill.driver.plan import Plan
from draftmill.driver.token_estimate import ANSWER_TOKENS, PROMPT_TOKENS, Assumed
from draftmill.errors import DraftmillError


def main() -> None:
    options = parser().parse_args()
    try:
        raw = yaml.safe_load(options.configfile.read_text(encoding="utf-8")) or {}
        found = estimate(Plan(completed(raw)), options_of(options))
    except (OSError, DraftmillError) as error:
        sys.exit(f"plan.py: {error}")
    print(json.dumps(found, indent=2) if options.json else text_of(found))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--configfile", type=Path, default=Path("config.yaml"))
    made.add_argument("--target-config", type=Path, help="the target's config.json")
    made.add_argument("--json", action="store_true", help="for programs")
    tokens = (
        "assumed tokens of a row's {} where rows or tokenizer are not at hand (default %(default)s)"
    )
    made.add_argument(
        "--prompt-tokens", type=positive(int), default=PROMPT_TOKENS, help=tokens.format("prompt")
    )
    made.add_argument(
        "--answer-tokens", type=positive(int), default=ANSWER_TOKENS, help=tokens.format("answer")
    )
    made.add_argument(
        "--shards-per-job",
        type=positive(int),
        default=1,
        help="shards that one extraction job makes (default %(default)s)",
    )
    made.add_argument(
        "--gate-shards-per-job",
        type=positive(int),
        default=1,
        help="shards that one job of the gate checks (default %(default)s)",
    )
    made.add_argument(
        "--checkpoint-gb",
        type=positive(float),
        help="size of the target's files in GB; by default from the files, else from config.json",
    )
    made.add_argument(
        "--read-gb-per-second",
        type=positive(float),
        default=1.0,
        help="how fast weights are read (default %(default)s)",
    )
    made.add_argument(
        "--tflops",
        type=positive(float),
        default=100.0,
        help="10^12 operations per second that extraction reaches (default %(default)s)",
    )
    return made


def positive(kind: type):
    """An argparse type: a number above 0."""

    def number(text: str):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number


def options_of(options: argparse.Namespace) -> Options:
    return Options(
        assumed=Assumed(options.prompt_tokens, options.answer_tokens),
        target_config=options.target_config,
        checkpoint_gb=options.checkpoint_gb,
        shards_per_job=options.shards_per_job,
        gate_shards_per_job=options.gate_shards_per_job,
        read_gb_per_second=options.read_gb_per_second,
        tflops=options.tflops,
    )


if __name__ == "__main__":
    main()
