"""What a check of the audit is: a function of the audited training that gives figures or says what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field

from draftmill.devices import is_the_machines
from draftmill.errors import DraftmillError


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
    """The result of check(*arguments), whose figures are values of JSON.

    What a check meets beside a fault, such as shapes that do not fit, is a failure of its name too, so that the
    other checks still speak; a damaged file or a full device is none.
    """
    try:
        return Result(name, check(*arguments))
    except Fault as fault:
        return Result(name, failure=f"audit: {name}: {fault}")
    except DraftmillError:
        raise
    except Exception as error:
        if is_the_machines(error):
            raise
        return Result(
            name,
            failure=f"audit: {name}: stopped by {type(error).__name__} ({error}); the step is made of other parts "
            "than this check knows.",
        )
