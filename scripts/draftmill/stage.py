"""The settings string of a job: what it was planned with, and the fingerprint that follows from it."""

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

from draftmill.errors import DraftmillError

PACKAGES = ("torch", "transformers", "speculators", "accelerate", "safetensors", "pyarrow")


def canonical(value: object) -> str:
    """JSON with sorted keys and no white space, so that order neither hides nor fakes a change."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def fingerprint_of(text: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a settings string."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def combine(fingerprints: Iterable[str]) -> str:
    """One fingerprint for a sequence of fingerprints."""
    return fingerprint_of("\n".join(fingerprints))


@dataclass(frozen=True)
class Stage:
    """One job as planned: rule, code fingerprint, configuration slice, fingerprints of its inputs."""

    rule: str
    code: str
    config: dict
    inputs: dict
    text: str

    @classmethod
    def parse(cls, text: str) -> "Stage":
        value = json.loads(text)
        return cls(value["rule"], value["code"], value["config"], value["inputs"], canonical(value))

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.text)

    def record(self, **details) -> dict:
        """The record that travels with an output. It holds no times, so equal inputs give equal
        bytes; wall time and memory stand in the job's benchmark under logs/."""
        versions = {"python": platform.python_version()} | {p: version(p) for p in PACKAGES}
        return {
            "rule": self.rule,
            "fingerprint": self.fingerprint,
            "settings": self.text,
            "versions": versions,
            **details,
        }

    def expect(self, name: str, path: object, found: str | None) -> None:
        """Refuses an input whose recorded fingerprint is not the planned one.

        Raises DraftmillError where `found` differs from `self.inputs[name]`.
        """
        wanted = self.inputs[name]
        if found != wanted:
            raise DraftmillError(
                f"{path}: carries the fingerprint {found}, but this run plans {wanted} for "
                f"'{name}': it was made by other code, settings or inputs; delete it and start "
                "Snakemake again to rebuild it."
            )
