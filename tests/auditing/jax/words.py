"""The texts of verdicts on scripts of JAX, a row for each script in `tests/golden/audit_jax.txt`."""

from __future__ import annotations

import re
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "golden" / "audit_jax.txt"


def rows() -> dict[str, str]:
    """Return name of a script -> what its user reads."""
    text = PATH.read_text(encoding="utf-8") if PATH.exists() else ""
    parts = re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    return {name: said.strip() for name, said in parts}


def write(name: str, said: str) -> None:
    """Write the row of a script; one process at a time."""
    found = {**rows(), name: said}
    text = "\n".join(f"## {one}\n{found[one]}\n" for one in sorted(found))
    PATH.write_text(text, encoding="utf-8")
