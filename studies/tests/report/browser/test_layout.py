"""Where plots, tables and places of the page stand: telephone, paper, links, a page without
JavaScript.
"""

from __future__ import annotations

import pytest

from gradcheck_suite.page import render as pages
from gradcheck_suite.page.charts import counts_plot
from gradcheck_suite.page.content import Figure, Report, Section, Table
from studies.report.charts import scoreboard_plot, times_plot

pytestmark = pytest.mark.full
METHODS = [f"a rule with a long name {i}" for i in range(9)]
STATES = ("found", "missed")
WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    """Return the path of a page with a wide heat map, long names, and a column of numbers of which
    some are starred.
    """
    cells = [{"bug": f"{b} bug", "method": m, "state": STATES[(b + i) % 2]}
             for b in range(60) for i, m in enumerate(METHODS)]  # fmt: skip
    counts = {"points where torch and JAX choose the same derivative": 368.0, "others": 1.0}
    modes = ("zero_", "zero_grad_foreach", "set_to_none", "flat_buffer")
    times = [{"x": 10.0**k, "y": 1.23456789, "mode": mode, "layout": f"{state} tensors"}
             for k in (5, 6) for state in STATES for mode in modes]  # fmt: skip
    figures = (
        Figure("cells", scoreboard_plot(cells, METHODS), "cells"),
        Figure("counts", counts_plot(counts, "points"), "counts"),
        Figure("times", times_plot(times, x="x", y="y"), "times"),
    )
    rows = tuple(
        (text, "averyverylongword") for text in ("1", "1.8e-12", "1.2e-04 *", "0.5", "3e-6")
    )
    table = Table("Sizes", ("size", "word"), rows)
    sections = (
        Section("zoo", "The zoo", "zoo", figures=figures, tables=(table,)),
        Section("trust", "Trust", "trust", ("More.",)),
    )
    path = tmp_path_factory.mktemp("layout") / "layout.html"
    path.write_text(
        pages.report_html(Report("A report", "the suite", "On it", "2026-01-01", (), sections)),
        encoding="utf-8",
    )
    return path


def test_a_wide_heat_map_scrolls_within_its_place_on_a_telephone(open_page, layout):
    page = open_page(layout, "#zoo", width=390, height=844)
    assert not page.evaluate(WIDE)
    place = page.locator("[data-chart=cells]")
    assert place.evaluate("place => place.scrollWidth > place.clientWidth")
    cells = place.locator("svg .mark-rect.role-mark path").evaluate_all(
        "all => all.slice(0, 9).map(cell => cell.getBoundingClientRect().width)"
    )
    assert len(cells) == 9
    assert min(cells) > 14  # a sign and the slanted name above it fit


@pytest.mark.parametrize("width", [390, 480])
def test_numbers_and_legends_are_within_their_plot_on_a_telephone(open_page, layout, width):
    page = open_page(layout, "#zoo", width=width, height=844)
    inside = """svg => [...svg.querySelectorAll('text')].every(text =>
      text.getBoundingClientRect().right <= svg.getBoundingClientRect().right + 1)"""
    for chart, text in (("counts", "368"), ("times", STATES[1])):
        drawn = page.locator(f"[data-chart={chart}] svg")
        assert text in drawn.inner_html()
        assert drawn.evaluate(inside), chart


def test_the_samples_of_dashes_are_drawn(open_page, layout):
    page = open_page(layout, "#zoo")
    strokes = page.locator("[data-chart=times] svg .role-legend-symbol path").evaluate_all(
        "all => all.map(path => getComputedStyle(path).stroke)"
    )
    assert len(strokes) == 6
    assert "none" not in strokes[4:]


def test_a_column_of_numbers_sorts_by_number_with_and_without_a_star(open_page, layout):
    page = open_page(layout, "#zoo")
    page.locator("details.table summary").click()
    page.locator("thead button").first.click()
    found = page.locator("tbody td:first-child").all_inner_texts()
    assert found == ["1.8e-12", "3e-6", "1.2e-04 *", "0.5", "1"]


def test_words_of_a_table_stay_whole(open_page, layout):
    page = open_page(layout, "#zoo", width=390, height=844)
    page.locator("details.table summary").click()
    assert page.locator("tbody td:nth-child(2)").first.evaluate("cell => cell.clientHeight < 40")


def test_paper_has_the_page_that_is_read_and_its_tables_as_they_stand(open_page, layout):
    page = open_page(layout, "#zoo")
    page.emulate_media(media="print")
    shown = page.locator("[role=tabpanel]").evaluate_all(
        "all => all.filter(one => one.clientHeight).map(one => one.id)"
    )
    assert shown == ["zoo"]
    assert page.locator("details.table table:visible").count() == 0


def test_a_place_needs_no_page_in_its_link_and_back_returns_to_where_the_reader_was(
    open_page, layout
):
    page = open_page(layout, "#zoo-title")
    assert page.locator("#zoo.current").count() == 1
    page.evaluate("scrollTo(0, 400)")
    page.wait_for_timeout(1000)  # scrolling is smooth
    # the header stays
    assert page.locator("#tab-trust").evaluate("tab => tab.getBoundingClientRect().top >= 0")
    page.locator("#tab-trust").click()
    page.wait_for_selector("#trust.current")
    page.go_back()
    page.wait_for_selector("#zoo.current")
    page.wait_for_timeout(1000)
    assert abs(page.evaluate("scrollY") - 400) < 20


def test_without_javascript_each_plot_is_a_picture(browser, layout):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(layout.as_uri())
    assert page.locator(".tools:visible, .chart:visible, #theme:visible").count() == 0
    drawn = page.locator(".static svg:visible")
    assert drawn.count() == page.locator(".chart").count() > 1
    sizes = drawn.evaluate_all(
        "all => all.map(svg => svg.getBoundingClientRect()).map(box => [box.width, box.height])"
    )
    assert all(width > 200 and height > 50 for width, height in sizes), sizes
    context.close()


def test_without_javascript_each_answer_has_the_width_of_a_telephone(browser, files):
    """Nothing moves the claims there, so they stand below the other answers and not beside them."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 844})
    shown = context.new_page()
    shown.goto((files / "plain.html").as_uri())
    assert shown.locator(".card.claims").count() == 1
    widths = shown.locator(".card").evaluate_all(
        "all => all.map(card => card.getBoundingClientRect().width)"
    )
    assert len(widths) == 4
    assert min(widths) > 300, widths
    context.close()


def test_with_javascript_no_picture_stands_beside_its_plot(open_page, layout):
    assert open_page(layout, "#zoo").locator(".static svg").count() == 0


def test_numbers_in_a_tooltip_have_three_digits(open_page, layout):
    page = open_page(layout, "#zoo")
    page.locator("[data-chart=times] svg .mark-symbol path").first.hover(force=True)
    page.wait_for_timeout(100)
    told = page.locator("#vg-tooltip-element").inner_text()
    assert "1.23" in told
    assert "1.234" not in told


def test_no_two_labels_of_an_axis_touch_on_a_screen_of_1024_pixels(open_page):
    page = open_page("plain.html", width=1024, height=768)
    touching = """svg => { const boxes = [...svg.querySelectorAll('.role-axis-label text')]
        .map(text => text.getBoundingClientRect()).filter(box => box.width);
      return boxes.some((a, i) => boxes.some((b, j) => i < j && a.left < b.right && b.left < a.right
        && a.top < b.bottom - 2 && b.top < a.bottom - 2)) }"""
    drawn = page.locator(".card .chart svg")
    assert drawn.count() == 4
    assert not any(drawn.nth(i).evaluate(touching) for i in range(4))
