"""Streamed extraction takes one layer's memory. (Its time is measured by benchmarks/extract.py.)"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["experts", "dense"])
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_the_peak_is_one_layer_with_activations_and_head(family, repository, tmp_path):
    script = repository / "benchmarks/streamed_memory.py"
    command = [sys.executable, script, "--family", family, "--layers", "3", "--check"]
    found = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert found.returncode == 0, found.stdout[-2000:]
