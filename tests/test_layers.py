"""The layers of the package, and what importing it costs.

The layers are data in `pyproject.toml`.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import gradcheck_suite

PACKAGE = "gradcheck_suite"
ROOT = Path(__file__).parents[1] / PACKAGE
FRAMEWORKS = ("torch", "jax", "jaxlib")
IMPORT_SECONDS = 0.2


def _broken_contracts(folder: Path) -> str:
    """Return what import-linter prints about a copy of the package.

    Empty where every contract is kept.
    """
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        "pyproject.toml",
    ]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path):
    """Return a folder with a copy of the package, of the studies and of their contracts."""
    for folder in (PACKAGE, "studies"):
        shutil.copytree(
            ROOT.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT.parent / "pyproject.toml", tmp_path)
    return tmp_path


def test_a_planted_upward_import_breaks_a_contract_and_nothing_else_does(copy):
    assert _broken_contracts(copy) == ""
    with (copy / PACKAGE / "core" / "case.py").open("a") as file:
        file.write(
            "\n\ndef _late():\n    import torch\n\n    from gradcheck_suite.run import runner\n"
        )
    broken = _broken_contracts(copy)
    assert "gradcheck_suite.core.case -> gradcheck_suite.run.runner" in broken
    assert "gradcheck_suite.core.case -> torch" in broken


def test_the_product_names_no_study():
    """Not as a string either: what is installed has none."""
    assert [
        path.name for path in ROOT.rglob("*.py") if re.search(r"\bstudies\b", path.read_text())
    ] == []


def _fresh(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT.parent
    ).stdout.strip()


def test_importing_the_package_imports_neither_framework():
    loaded = _fresh(
        f"import sys, {PACKAGE}.pytest_plugin; print([m for m in {FRAMEWORKS!r} if m in sys.modules])"
    )
    assert loaded == "[]"


WITHOUT_STUDIES = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"optax", "pytest_benchmark", "ray"} or name.startswith("studies"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from gradcheck_suite.__main__ import main
sys.exit(main())
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [("verify", "zero_", "--examples", "2"), ("audit", "{script}"), ("trainers", "--list")],
)
def test_the_product_needs_neither_studies_nor_their_packages(command, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(2):\n    optimizer.zero_grad()\n"
        "    torch.nn.functional.mse_loss(model(torch.ones(3, 2)), torch.zeros(3, 1)).backward()\n"
        "    optimizer.step()\n"
    )
    words = [word.format(script=script) for word in command]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_STUDIES, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_package_is_fast():
    """In processor time, which other work on the machine does not change."""
    code = f"import time; t = time.process_time(); import {PACKAGE}; print(time.process_time() - t)"
    assert statistics.median(float(_fresh(code)) for _ in range(3)) < IMPORT_SECONDS


def test_an_audit_of_a_jax_script_imports_no_torch():
    rooms = [path.stem for path in (ROOT / "auditing" / "jax").glob("*.py")]
    names = ", ".join(f"{PACKAGE}.auditing.jax.{one}" for one in rooms if one != "__init__")
    assert _fresh(f"import sys, {names}; print('torch' in sys.modules)").strip() == "False"


def test_every_public_name_is_there():
    assert [
        name for name in gradcheck_suite.__all__ if getattr(gradcheck_suite, name, None) is None
    ] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'checks'"):
        gradcheck_suite.checks  # noqa: B018
