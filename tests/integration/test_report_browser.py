"""The HTML report in a real browser: charts are drawn, nothing is logged, nothing leaves the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.directory import ResultSet
from reports.html import render_html
from tests.integration.browser import find_chromium, open_page
from tests.unit.reports import samples

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")

DRAWN = """
[...document.querySelectorAll(".plot")].map((plot) => ({
  id: plot.id,
  marks: plot.querySelectorAll(".barlayer .point path, .scatterlayer .js-line").length,
  width: plot.querySelector(".main-svg")?.getBoundingClientRect().width ?? 0,
}))
"""


@pytest.fixture(scope="module")
def page_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(samples.matrix()), encoding="utf-8")
    return path.as_uri()


async def test_charts_are_drawn_controls_work_and_the_theme_follows(page_url: str) -> None:
    async with open_page() as page:
        await page.open(page_url)
        plots = await page.evaluate(DRAWN)
        assert {plot["id"] for plot in plots} == {
            *(f"panel-0-{name}" for name in ("output_tokens_per_s", "ttft_p50_s", "percentiles", "frontier", "time")),
            "startup-0",
        }
        assert all(plot["marks"] >= 4 and plot["width"] > 300 for plot in plots), plots

        line = 'document.querySelector("#panel-0-percentiles .js-line").getAttribute("d")'
        before = await page.evaluate(line)
        await page.evaluate(
            """[...document.querySelectorAll('[data-controls="panel-0-percentiles"] button')]
               .find((button) => button.textContent === "E2EL").click()"""
        )
        assert await page.evaluate(line) != before

        background = "getComputedStyle(document.body).backgroundColor"
        light = await page.evaluate(background)
        await page.evaluate('document.getElementById("theme").click()')
        assert await page.evaluate(background) != light
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.problems == []


async def test_every_view_of_every_chart_can_be_drawn(page_url: str) -> None:
    async with open_page() as page:
        await page.open(page_url)
        empty = await page.evaluate(
            """(async () => {
                 const empty = [];
                 for (const button of document.querySelectorAll(".controls button")) {
                   button.click();
                   await new Promise(requestAnimationFrame);
                   const plot = document.getElementById(button.closest(".controls").dataset.controls);
                   if (!plot.querySelector(".barlayer .point path, .scatterlayer .js-line"))
                     empty.push(plot.id + " " + button.textContent);
                 }
                 return empty;
               })()"""
        )
        assert empty == []
        assert await page.evaluate('document.querySelectorAll(".controls button").length') >= 12
        assert page.problems == []


async def test_what_cannot_run_is_told_with_its_reason(page_url: str) -> None:
    async with open_page() as page:
        await page.open(page_url)
        text = await page.evaluate('document.getElementById("unsupported").innerText')
        assert "compile · FLASH_ATTN" in text
        assert "needs the package flash-attn-4" in text
        assert "out of memory <b>not markup</b>" in await page.evaluate(
            'document.querySelector("#problems pre").textContent'
        )


async def test_a_dark_phone_has_no_sideways_scroll(page_url: str) -> None:
    async with open_page() as page:
        await page.open(page_url, width=390, height=844, dark=True)
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert await page.evaluate("document.documentElement.scrollWidth") == 390
        too_wide = await page.evaluate(
            """[...document.querySelectorAll("body *")]
               .filter((node) => !node.closest(".scroll, pre") && node.getBoundingClientRect().right > 391)
               .map((node) => node.tagName + "." + node.className)"""
        )
        assert too_wide == []
        assert page.problems == []


async def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\">"
    result = samples.cell("eager", "TORCH_SDPA", 2.0, model=evil)
    result.startup[0].phases[0].name = evil
    path = tmp_path / "report.html"
    path.write_text(render_html(ResultSet(title=evil, results=[result])), encoding="utf-8")
    async with open_page() as page:
        await page.open(path.as_uri())
        assert await page.evaluate('document.querySelectorAll("img").length') == 0
        assert "owned" not in (await page.evaluate("document.title")).split("<")[0]
        assert await page.evaluate('document.querySelector("h1").textContent') == evil
        assert page.problems == []
