"""What holds of every table and every figure of the page, made-up and kept: they sort, filter and
say their source.
"""

from __future__ import annotations

import re

import pytest

from studies.tests.report.browser.test_browser import KEPT, WIDE

pytestmark = pytest.mark.full
BOTH = pytest.mark.parametrize("name", ["report.html", KEPT], ids=["made-up", "kept"])
TABLES = """() => [...document.querySelectorAll('details.table')].map(part => {
  const table = part.querySelector('table'), rows = () => [...table.tBodies[0].rows];
  const own = cell => {
    const text = cell.textContent.trim();
    if (cell.dataset.value !== undefined) return +cell.dataset.value;
    return cell.className === 'number' && text !== '-' ? +text : text.toLowerCase();
  };
  const inOrder = (a, b) => typeof a !== typeof b ? typeof a === 'number'
    : typeof a === 'number' ? a <= b : a.localeCompare(b, undefined, { numeric: true }) <= 0;
  const sorted = column => {
    const values = rows().map(row => own(row.cells[column]));
    return values.every((value, i) => !i || inOrder(values[i - 1], value));
  };
  const headers = [...table.tHead.rows[0].cells];
  const sorts = headers.every((header, column) => {
    header.querySelector('button').click();
    return header.getAttribute('aria-sort') === 'ascending' && sorted(column);
  });
  const input = part.querySelector('input'), total = rows().length;
  const word = rows()[total - 1].textContent.trim().split(/\\s+/)[0].toLowerCase();
  input.value = word; input.dispatchEvent(new Event('input'));
  const kept = rows().filter(row => !row.hidden);
  const filters = kept.length > 0 && rows().every(row => row.hidden !== row.textContent.toLowerCase().includes(word))
    && part.querySelector('output').textContent === `${kept.length} of ${total} rows`;
  input.value = ''; input.dispatchEvent(new Event('input'));
  return { name: table.caption.textContent, closed: !part.open, sorts, filters, all: !rows().some(row => row.hidden) };
})"""
ORIGINS = """() => [...document.querySelectorAll('figure.plot')].map(figure => {
  const own = figure.querySelector('details.sources');
  const around = figure.closest('.claim, .card, .violation, .part');
  const note = around.classList.contains('violation') ? around.querySelector('.note:last-child') : null;
  const from = own || around.querySelector('details.sources');
  const said = note ? [] : [...from.querySelectorAll('li')].map(run =>
    [...run.childNodes].filter(part => part.textContent.trim()).map(part => part.textContent));
  return { chart: figure.querySelector('.chart').dataset.chart, said, note: note && note.textContent };
})"""


@BOTH
def test_every_table_is_closed_sorts_by_each_column_and_filters(open_page, name):
    tables = open_page(name).evaluate(TABLES)
    assert len(tables) > 10
    failed = [table for table in tables if not all(table.values())]
    assert failed == []


@BOTH
def test_no_table_stands_open_but_matrices_and_rows_of_a_claim(open_page, name):
    page = open_page(name)
    others = page.locator(
        "main table:not(.matrix, .series, details.table table, details.document table)"
    )
    assert others.count() == 0
    rows = page.locator("table.series").evaluate_all("all => all.map(table => table.rows.length)")
    assert max(rows, default=0) <= 4
    assert page.locator("#claims .claim .chart").count() > 1  # the other figures are plots


@BOTH
def test_every_figure_says_command_commit_date_and_machine(open_page, name):
    figures = open_page(name).evaluate(ORIGINS)
    assert len(figures) > 8
    for figure in figures:
        if figure["note"] is not None:
            assert figure["note"].startswith("Found on a processor"), figure
            continue
        assert figure["said"], figure
        for command, rest, *_ in figure["said"]:
            assert len(command) > 5, command
            assert re.match(
                r"20\d\d-\d\d-\d\d, commit ([0-9a-f]{9}|unknown), [^,]+, \d+ cores", rest
            ), rest


@BOTH
def test_on_a_sheet_of_paper_nothing_runs_off_its_side(open_page, name):
    page = open_page(name, width=718, height=1000)  # A4 within its margins
    page.emulate_media(media="print")
    assert not page.evaluate(WIDE)


@BOTH
def test_whatever_the_keyboard_reaches_has_a_name(open_page, name):
    page = open_page(name)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('a[href], button, input, summary, [tabindex="0"]')].filter(place =>
          !(place.textContent.trim() || place.ariaLabel || place.closest('label'))).map(place => place.outerHTML)"""
    )
    assert unnamed == []
    assert page.locator("[tabindex]").evaluate_all("all => all.every(place => place.tabIndex <= 0)")
