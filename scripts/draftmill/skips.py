"""Rows that cannot be used: they stop the run, or are left out and counted."""

from draftmill.errors import DraftmillError


class Skips:
    """Collects reasons under the policy "skip"; raises at the first under "stop"."""

    def __init__(self, policy: str):
        self.policy = policy
        self.reasons: list[str] = []

    def add(self, where: str, reason: str) -> None:
        """`where` names the file and the row, `reason` says what is wrong with it."""
        if self.policy == "stop":
            raise DraftmillError(
                f"{where}: {reason}; mend the row, or set on_malformed: skip for this source to leave "
                "such rows out and have them counted in the report."
            )
        self.leave_out(where, reason)

    def leave_out(self, where: str, reason: str) -> None:
        """Counts a row that is nobody's mistake, whatever the policy."""
        self.reasons.append(f"{where}: {reason}")
        print(f"skipped {self.reasons[-1]}", flush=True)
