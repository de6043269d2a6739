"""The next layer's bytes, brought into the system's page cache while the present layer computes."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from draftmill import checkpoint_files

STEP = (
    128 << 10
)  # bytes; the kernel cuts a longer request to its read-ahead window (128 KiB by default)


class ReadAhead:
    """One thread that asks for tensors; it copies nothing and its memory is the system's."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._last: Future | None = None

    def start(self, names: list[str]) -> None:
        """Begins with these tensors and returns at once; what was asked before and has not begun is dropped."""
        if self._last is not None:
            self._last.cancel()
        self._last = self._thread.submit(self._ask, checkpoint_files.ranges(self.folder, names))

    def _ask(self, wanted: dict[Path, list[tuple[int, int]]]) -> None:
        for path, ranges in wanted.items():
            with open(path, "rb") as file:
                for start, end in ranges:
                    for offset in range(start, end, STEP):
                        length = min(STEP, end - offset)
                        os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
