"""How the user guide is built: `tox -e docs`. Nothing is fetched from elsewhere while it is."""

from __future__ import annotations

from pathlib import Path

import gradcheck_suite
from gradcheck_suite.loops.trainers import TRAINERS

project = "gradcheck-suite"
author = "the gradcheck-suite developers"
release = version = gradcheck_suite.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]
needs_sphinx = "8.2"

# docstrings say `name` for code, as Markdown does
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["console.css"]
html_title = f"gradcheck-suite {release}"
html_show_copyright = False
html_show_sphinx = False


def trainers_table() -> str:
    """Return the table of extras and of the trainers that each brings."""
    brought: dict[str, list[str]] = {}
    for trainer in TRAINERS.values():
        brought.setdefault(trainer.package, []).append(f"`{trainer.name}`")
    rows = [f"| `{extra}` | {', '.join(names)} |" for extra, names in brought.items()]
    return "\n".join(["| extra | trainers |", "| --- | --- |", *rows, ""])


def setup(app: object) -> None:
    """Write what pages include and the code decides."""
    folder = Path(__file__).parent / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "trainers.md").write_text(trainers_table())
