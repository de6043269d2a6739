"""What a check of the audit is: a function of the audited training that gives figures or says what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field


class Fault(Exception):
    """One sentence: what was found, what it means, where to look."""


@dataclass
class Result:
    """What one check found. failure: None where it passed."""

    name: str
    figures: dict = field(default_factory=dict)
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None


def require(fine: object, sentence: str) -> None:
    """Raises Fault with the sentence unless `fine`."""
    if not fine:
        raise Fault(sentence)


def run(name: str, check: Callable[..., dict], *arguments: object) -> Result:
    """The result of check(*arguments), whose figures are values of JSON."""
    try:
        return Result(name, check(*arguments))
    except Fault as fault:
        return Result(name, failure=f"audit: {name}: {fault}")
