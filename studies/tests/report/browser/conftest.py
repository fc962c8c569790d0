"""An installed Chromium, driven by playwright; without either the tests here skip and say why."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gradcheck_suite.core.case import DTYPES, Case, Plan
from gradcheck_suite.page import render as pages
from gradcheck_suite.page.violation import read_violation
from studies.tests.report.made_up import (
    EVIL,
    benchmark,
    build,
    calibration,
    claim,
    counterexample,
    fill,
    record,
    verdict,
)

KEPT = Path(__file__).parents[4] / "reports"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MODES = ("zero_", "zero_grad", "zero_grad_foreach", "set_to_none", "grad_none", "flat_buffer", "zero_before_forward",
         "zero_between")  # fmt: skip


@pytest.fixture(scope="session")
def browser():
    """Return a running browser."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: expected one of {', '.join(NAMES)} on the path")
    with playwright.sync_playwright() as running:
        # the sandbox does not start under root, as in a container
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        started = running.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Return the report of made-up records, text that must not run in every string that a record
    may choose, and that of the kept records.
    """
    folder = tmp_path_factory.mktemp("reports")
    _fill(folder, EVIL)
    stored = counterexample(folder, loop=f"my_loop.py:{EVIL}")
    (folder / "report.html").write_text(pages.report_html(build(folder)), encoding="utf-8")
    one = pages.violations_html([read_violation(stored)], [EVIL])
    (folder / "violation.html").write_text(one, encoding="utf-8")
    plain = tmp_path_factory.mktemp("plain")
    _fill(plain, "and so on")
    (folder / "plain.html").write_text(pages.report_html(build(plain)), encoding="utf-8")
    (folder / "kept.html").write_text(pages.report_html(build(KEPT)), encoding="utf-8")
    return folder


def _fill(folder, text):
    """Write records whose every free string has a text."""
    if text == EVIL:
        fill(folder)
    for mode in MODES:
        for dtype in DTYPES:
            reached = {"layers": {text: 3}, "losses": {text: 2}, "splits": {text: 1}}
            verdict(folder, mode, dtype=dtype, reached=reached)
    for i in range(1, 21):
        words = {
            name: f"{name} {text}"
            for name in ("source", "text", "how", "sentence", "condition", "counterexample")
        }
        kind = ("confirmed", "conditional", "refuted")[i % 3]
        figures = {
            f"{text}, zero_ / None": "16 / 0",
            text: text,
            "several": [1, 2],
            "one": 1.0,
            f"two {text}": 2.0,
        }
        claim(
            folder,
            f"C1.{i}" if i < 20 else "C2.5",
            **{**words, "source": text},
            verdict=kind,
            figures=figures if i < 3 else {},
        )
    calibration(folder)
    for i, size in enumerate((10**5, 10**6, 10**7)):
        benchmark(folder, "both", 0, measures="step", parameters=size, items=1, zero=0.1, none=0.09, saved=0.01,
                  saved_quartiles=[0.0, 0.02], faster=15 + i, pairs=21, bytes_between=1)  # fmt: skip
    for mode, gradients in (("zero_", [4, 4, 4, 4]), ("set_to_none", [0, 4, 4, 0])):
        window = {"parameters": [4 << 20] * 4, "gradients": [g << 20 for g in gradients]}
        record(folder, "memory", device="cpu", parameters=10**6, layout="few", dtype="float32", micro_batches=1,
               mode=mode, gradients_between=gradients[-1] << 20, peak=8 << 20, resident_peak=None,
               window=window)  # fmt: skip
    answer = {"trainer": text, "package": text, "version": text, "question": text, "why": text}
    case = Case("model", Plan((1, 2), 2)).to_json()
    violation = {"kind": "gradient", "diagnosis": text, "explanation": text, "case": case}
    record(folder, "trainer", **answer, result={"loop": text, "cases": 1, "violation": violation})
    bridged = {
        "architecture": text,
        "package": text,
        "version": text,
        "operations": 7,
        "narrow": [text],
    }
    record(
        folder,
        "bridge",
        **bridged,
        loss_error=1e-9,
        widened=False,
        gradient_error=2e-7,
        allowed=1e-6,
    )
    names = ("operation", "point", "dtype", "torch", "jax", "convention")
    sent = {text: [3, 56]}
    record(
        folder, "traffic", loop=text, ranks=2, accumulation_steps=1, observed=sent, predicted=sent
    )
    record(folder, "atlas", rows=[{**dict.fromkeys(names, text), "agree": False}] * 3)
    moved = {
        "before": 1.0,
        "after_zero": 0.5,
        "after_none": 1.0,
        "same": False,
        "to_the_bit": True,
        "as_predicted": True,
    }
    record(folder, "zero-or-none", optimizer=text, variant="plain", settings={text: text}, law=text,
           zero_changes=[text], none_changes=[text], **moved)  # fmt: skip
    (folder / "findings").mkdir()
    (folder / "findings" / "one.md").write_text(
        f"# A finding {text}\n\n{text}\n\n```python\n{text}\n```\n"
    )


@pytest.fixture
def open_page(browser, files):
    """Return a function that opens a file at a size.

    Afterwards nothing was said, fetched or executed.
    """
    said, contexts = [], []

    def opened(name="report.html", hash_="", *, width=1280, height=800, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith("file:") else said.append(request.url),
        )
        page.goto(f"{(files / name).as_uri()}{hash_}")
        page.evaluate("() => window.drawnPlots")
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.planted") is None
            assert page.locator("img, iframe, object").count() == 0
        context.close()
    assert [text for text in said if not text.startswith("data:")] == []
