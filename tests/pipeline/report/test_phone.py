"""The report in headless Chromium at the width of a phone: all columns are visible, and each chart has a large view."""

from pathlib import Path

from pipeline.report.report import write_report
from tests.pipeline.report.example_runs import write_demo_run
from tests.pipeline.serve.chromium import chromium, needs_chromium

CUT_OFF = """() => [...document.querySelectorAll("table, td, svg, h1, figcaption, .card")]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML.slice(0, 80))"""


@needs_chromium
def test_a_phone_shows_every_column_and_a_chart_on_the_whole_screen(tmp_path: Path) -> None:
    write_demo_run(tmp_path)
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(write_report(tmp_path).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate(CUT_OFF) == []
        row = page.locator("#changes tbody tr").first
        texts = row.locator("td").all_inner_texts()
        names = [each.get_attribute("data-label") for each in row.locator("td").all()]
        assert names[0] == "Change" and names[-1] == "worse" and len(texts) == len(names) == 8
        chart = page.locator("#ppo figure").first
        assert chart.bounding_box()["width"] < 390
        chart.locator("strong a").click()
        box = chart.bounding_box()
        assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 390, 844)
        page.get_by_text("Close").locator("visible=true").click()
        assert chart.bounding_box()["width"] < 390
        assert 0 <= chart.bounding_box()["y"] < 844  # the page is where it was
