"""The script of each finding under `reports/findings/` prints what the finding says."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

FINDINGS = sorted((Path(__file__).parents[3] / "reports" / "findings").glob("*.md"))
PACKAGES = (
    "transformers",
    "accelerate",
    "lightning",
    "keras",
    "pytorch_accelerated",
    "poutyne",
    "fastai",
    "deepspeed",
    "optax",
)


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
@pytest.mark.full
def test_the_script_prints_what_the_finding_says(path, tmp_path):
    text = path.read_text()
    script = re.search(r"```python\n(.*?)```", text, re.S)[1]
    printed = re.search(r"```text\n(.*?)```", text, re.S)[1]
    for package in PACKAGES:
        if re.search(rf"^(from|import) .*\b{package}\b", script, re.M):
            version = re.search(rf"{package.replace('_', '-')} (\d+\.\d+\.\d+)", text)[1]
            try:
                installed = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                installed = None
            if installed != version:
                pytest.skip(f"needs {package} {version}")
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == printed, done.stderr


def test_the_guide_lists_every_finding():
    page = (Path(__file__).parents[3] / "docs" / "found.md").read_text()
    for path in FINDINGS:
        assert f"`{path.stem}`" in page
