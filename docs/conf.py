"""How the user guide is built: `tox -e docs`. Nothing is fetched from elsewhere while it is."""

from __future__ import annotations

import re

import gradcheck_suite

project = "gradcheck-suite"
author = "the gradcheck-suite developers"
release = version = gradcheck_suite.__version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
needs_sphinx = "8.2"

myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["console.css"]
html_title = f"gradcheck-suite {release}"
html_show_copyright = False
html_show_sphinx = False


REPOSITORY = f"https://github.com/gradcheck-suite/gradcheck-suite/blob/v{release}"


def with_contents(app: object, name: str, text: list[str]) -> None:
    """Add hidden tables of contents to the index, of the pages that each of its sections links.

    The index itself has none: a file view would show the directives. What a page links outside of
    `docs/` is no part of the site, and leads to the repository.
    """
    text[0] = re.sub(r"\]\(\.\./", f"]({REPOSITORY}/", text[0])
    if name != "index":
        return
    seen: set[str] = set()
    for section in re.split(r"^## ", text[0], flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        linked = dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md\)", body))
        pages = [page for page in linked if page not in seen]
        seen |= {*pages}
        listed = "\n".join(pages)
        text[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{listed}\n```\n"


def setup(app: object) -> None:
    """Add what the site has and the pages do not."""
    app.connect("source-read", with_contents)  # type: ignore[attr-defined]
