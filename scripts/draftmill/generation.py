"""What an engine is asked: the prompts of one shard as token ids, and what decides their answers.

An engine is a module with one function, `generate(task)`. It returns the answers, row ->
{"response_ids", "finish_reason"}, and what it adds to the record. `response_ids` hold the end token where
there is one; `finish_reason` is "stop" or "length". Rows that it gave to `task.skip` have no answer.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import transformers


@dataclass(frozen=True)
class Task:
    """The prompts of one shard, row -> token ids, with the settings, the target and its tokenizer.

    `where` names a row in messages; `skip` leaves one out for a reason, or stops the run; `options` is how
    the engine is reached, which changes no answer.
    """

    prompts: dict[int, list[int]]
    settings: dict
    manifest: dict
    tokenizer: transformers.PreTrainedTokenizerBase
    where: Callable[[int], str]
    skip: Callable[[int, str], None]
    options: dict = field(default_factory=dict)

    def seed(self, row: int | None = None, bits: int = 56) -> int:
        """A seed of this shard's own, or of one of its rows, so that no two sample alike."""
        text = f"{self.settings.get('seed', 0)}/{self.settings.get('stream', '')}"
        text += "" if row is None else f"/{row}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) % 2**bits
