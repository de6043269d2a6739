"""How many tokens a source has: counted where its tables exist, else from a sample, else assumed."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftmill import gguf_tokenizer, raw_rows, tables, target_config, target_tokenizer
from draftmill.conversations import MalformedRow, parse
from draftmill.driver.plan import Plan
from draftmill.driver.target_description import tokenizer_folder
from draftmill.errors import DraftmillError
from draftmill.rendering import CannotRender, Renderer
from draftmill.stdlib_prompts import stdlib_prompts
from draftmill.target_location import package_file

SAMPLE_ROWS = 256
PROMPT_TOKENS = 512  # assumed where a source's rows are not at hand
ANSWER_TOKENS = 512


@dataclass(frozen=True)
class TokenEstimate:
    """Tokens and samples (training sequences) of a source, and the figure's basis in words.

    prompt_tokens: the part of `tokens` that is no generated answer.
    """

    rows: int
    shards: int
    samples: int
    tokens: int
    prompt_tokens: int
    basis: str
    rough: bool  # an assumption, or what an engine may not reach


@dataclass(frozen=True)
class Assumed:
    """Tokens per row where rows or tokenizer are not at hand."""

    prompt: int = PROMPT_TOKENS
    answer: int = ANSWER_TOKENS


class TokenEstimator:
    """Estimates every source of a plan.

    folder: the target's checkpoint, None where it is not at hand.
    context: the target's own context length, in tokens; None where it knows none.
    """

    def __init__(self, plan: Plan, folder: Path | None, context: int | None, assumed: Assumed):
        self.plan, self.assumed = plan, assumed
        longest = (plan.config["target"]["max_length"], context)
        self.limit = min((n for n in longest if n is not None), default=math.inf)
        self.renderer, self.lack = renderer_of(plan.config["target"], folder)

    def estimate(self, name: str) -> TokenEstimate:
        """Measured in the source's token tables; else sampled; else assumed."""
        source = self.plan.config["sources"][name]
        ranges = self.plan.ranges[name]
        rows = sum(stop - start for start, stop in ranges.values())
        measured = self._measured(name)
        if measured is not None:
            samples, tokens, prompt = measured
            return TokenEstimate(rows, len(ranges), samples, tokens, prompt, "measured", False)
        remote = source["kind"] == "hub" and not Path(source["id"]).is_dir()
        if self.renderer is None or remote:
            why = "rows not at hand" if remote else self.lack
            return self._assumed(name, rows, len(ranges), why)
        return self._sampled(name, source, rows, len(ranges))

    def _measured(self, name: str) -> tuple[int, int, int] | None:
        """Samples, tokens and prompt tokens of the finished tables; None unless all are as planned."""
        samples = tokens = prompt = 0
        for shard in self.plan.shards(name):
            path = Path(self.plan.root) / "tokens" / name / f"{shard}.parquet"
            if not path.is_file():
                return None
            found = tables.record_of(path)
            wanted = self.plan.fingerprint("tokenize_conversations", source=name, shard=shard)
            if found["fingerprint"] != wanted:
                return None
            starts = pq.read_table(path, columns=["start"]).column("start")
            samples, tokens = samples + len(starts), tokens + found["tokens"]
            prompt += pc.sum(starts).as_py() or 0
        return samples, tokens, prompt

    def _assumed(self, name: str, rows: int, shards: int, why: str) -> TokenEstimate:
        answer = self.assumed.answer
        if self.plan.generates(name):
            answer = min(answer, self.plan.config["responses"]["max_new_tokens"])
        prompt = min(self.assumed.prompt, self.limit)
        each = min(prompt + answer, self.limit)
        basis = f"assumed {prompt} + {each - prompt} a row ({why})"
        return TokenEstimate(rows, shards, rows, rows * each, rows * prompt, basis, True)

    def _sampled(self, name: str, source: dict, rows: int, shards: int) -> TokenEstimate:
        chosen = spread(self.plan.ranges[name], min(rows, SAMPLE_ROWS))
        samples = tokens = prompt = 0
        for number, row in zip(chosen, rows_at(source, chosen), strict=True):
            for start, length in self._lengths(name, source, row, number):
                samples, tokens, prompt = samples + 1, tokens + length, prompt + start
        scale = rows / len(chosen)
        answers = "given answers" if source["responses"] == "given" else "at most"
        return TokenEstimate(
            rows,
            shards,
            round(samples * scale),
            round(tokens * scale),
            round(prompt * scale),
            f"{answers}, tokenized {len(chosen)} rows",
            self.plan.generates(name),
        )

    def _lengths(
        self, name: str, source: dict, row: bytes, number: int
    ) -> Iterator[tuple[int, int]]:
        """(start of the answer, length) of each sample that a row gives; nothing where it is left out."""
        try:
            messages = parse(row, number, source["responses"]).messages
            if self.plan.generates(name):
                start = len(self.renderer.prompt_ids(messages))
                found = [(start, start + self.plan.config["responses"]["max_new_tokens"])]
            else:
                found = [(s.start, len(s.ids)) for s in self.renderer.samples(messages)]
        except (MalformedRow, CannotRender):
            return  # the stages leave such a row out, or stop at it
        yield from ((start, length) for start, length in found if length <= self.limit)


def spread(ranges: dict[str, tuple[int, int]], wanted: int) -> list[int]:
    """`wanted` row numbers spread evenly over the ranges, ascending."""
    first = min(start for start, _ in ranges.values())
    rows = sum(stop - start for start, stop in ranges.values())
    return [first + i * rows // wanted for i in range(wanted)]


def rows_at(source: dict, numbers: list[int]) -> Iterator[bytes]:
    """The raw rows with these numbers, ascending, read in one pass."""
    first = numbers[0]
    if source["kind"] == "stdlib":
        rows = (json.dumps({"prompt": p}).encode() for p in stdlib_prompts()[first:])
    elif source["kind"] == "file":
        rows = raw_rows.file_rows(Path(source["path"]), first)
    else:
        rows = raw_rows.hub_rows(source, first)
    wanted = set(numbers)
    ahead = itertools.islice(enumerate(rows, first), numbers[-1] - first + 1)
    return (row for number, row in ahead if number in wanted)


def renderer_of(target: dict, folder: Path | None) -> tuple[Renderer | None, str]:
    """The renderer of the target's tokenizer, or None and why there is none.

    folder: the checkpoint; None takes a GGUF's own tokenizer where the target is one.
    """
    where = tokenizer_folder(target, folder)
    if where is None and not (folder is None and target["package"]):
        return None, "tokenizer not at hand"
    if folder is None and not target["package"]:
        return None, "the target's end tokens not at hand"
    try:
        if folder is None:
            path = package_file(target["package"], target["gguf"])
            tokenizer = gguf_tokenizer.load(path, proven=bool(target["tokenizer"]["golden"]))
            stop_ids = [tokenizer.eos_token_id]
        else:
            about = {"checkpoint": str(folder), "trust_remote_code": target["trust_remote_code"]}
            settings = target["tokenizer"]
            tokenizer = target_tokenizer.load(str(where), settings["trust_remote_code"])
            stop_ids = target_config.stop_ids(about)
        return Renderer(tokenizer, target["chat_template_kwargs"], stop_ids), ""
    except (DraftmillError, OSError, ValueError) as error:
        return None, f"tokenizer not usable: {str(error).splitlines()[0]}"
