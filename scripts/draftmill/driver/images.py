"""Container images: only those of containers/images.lock, only by digest."""

from pathlib import Path

import yaml

from draftmill.errors import DraftmillError

LOCK = Path(__file__).resolve().parents[3] / "containers" / "images.lock"


def container(name: str, wanted: bool) -> str:
    """The container string of an image.

    wanted: whether this invocation runs rules in containers. Raises DraftmillError where it does and the
    image has no digest yet.
    """
    image = yaml.safe_load(LOCK.read_text(encoding="utf-8"))["images"][name]
    if wanted and image["digest"] is None:
        raise DraftmillError(
            f"containers/images.lock: image '{name}' has no digest, since it has not been built and "
            "pushed yet; run without containers (no --software-deployment-method)."
        )
    return f"docker://{image['repository']}@{image['digest'] or 'sha256:not-built-yet'}"
