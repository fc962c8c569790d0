"""The page on notebooks, run as a notebook by a real kernel: what cells print is what the page
shows.
"""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, Block, blocks, is_alike

PAGE = ROOT / "docs" / "notebooks.md"


def executed(cells: list[str], folder):
    """Return the outputs of each cell, as the notebook format has them."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell["outputs"] for cell in notebook.cells]


def printed(outputs) -> str:
    """Return what a cell printed, without the colours that a notebook shows."""
    text = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def pairs(page: list[Block]) -> list[tuple[str, str | None]]:
    """Return each cell with the text that the page shows below it, None where it shows none."""
    found: list[tuple[str, str | None]] = []
    for block in page:
        if block.language == "python":
            found.append((block.text, None))
        else:
            found[-1] = found[-1][0], block.text
    return found


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A folder, and no history of the machine's."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return tmp_path


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_kernel_prints_what_the_page_shows(kernel):
    page = pairs(blocks(PAGE.read_text()))
    outputs = executed([cell for cell, _ in page], kernel)
    for (cell, shown), found in zip(page, outputs, strict=True):
        if shown is not None:
            assert is_alike(shown, printed(found)), f"{cell}\nprinted:\n{printed(found)}"
        assert not [one for one in found if one.get("name") == "stderr"], cell
    (result,) = next(
        found for (cell, _), found in zip(page, outputs, strict=True) if cell == "audit.result\n"
    )
    html = result["data"]["text/html"]
    assert html.count("<tr>") == 1 + 4  # the header and the window's micro-batches
    # 1/14 of the largest weight, 1/4, is 29%: where each mark stands
    assert len(re.findall(r"left:29%", html)) == 4
    assert [int(width) for width in re.findall(r"width:(\d+)%", html)] == [25, 50, 14, 100]
    assert "<script" not in html
