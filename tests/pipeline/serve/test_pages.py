"""The chat page, the arena and the report in a real headless Chromium."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from pipeline.report.report import write_report
from pipeline.serve.app import create_app
from pipeline.serve.arena import Arena
from pipeline.serve.models import ServedModel
from pipeline.serve.votes import Contestant, VoteFile
from tests.pipeline.report.example_runs import write_demo_run
from tests.pipeline.serve.chromium import HOSTILE, chromium, needs_chromium
from tests.pipeline.serve.running import LIMIT, pause_after, served

CUT_OFF = """() => [...document.querySelectorAll("table, td, svg, h1, figcaption, .card")]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """A tab of a browser for all tests of this file."""
    with chromium() as browser, browser.new_context() as context:
        context.set_default_timeout(LIMIT * 1000)
        yield context.new_page()


@pytest.fixture(scope="module")
def url(models: dict[str, ServedModel]) -> Iterator[str]:
    with served(create_app(models, key=None)) as address:
        yield address


@pytest.fixture
def page(tab: Page, url: str) -> Iterator[Page]:
    """The chat page without an earlier conversation."""
    tab.goto(url)
    expect(tab.locator("#model option")).to_have_count(2)
    tab.locator("summary").click()
    tab.fill("#max_tokens", "12")
    yield tab
    tab.unroute_all()
    tab.evaluate("localStorage.clear(); sessionStorage.clear()")


@pytest.fixture
def votes(tmp_path: Path) -> VoteFile:
    return VoteFile(tmp_path / "votes.jsonl")


@pytest.fixture
def arena(tab: Page, models: dict[str, ServedModel], votes: VoteFile) -> Iterator[Page]:
    contestants = (Contestant("ppo", "aa"), Contestant("sft", "bb"))
    made = partial(Arena, [*models.values()], contestants, votes)
    with served(create_app(models, key=None, arena=made)) as url:
        yield open_arena(tab, url)
        tab.unroute_all()


def open_arena(tab: Page, url: str) -> Page:
    tab.goto(url)
    tab.locator("summary").click()
    tab.fill("#max_tokens", "8")
    return tab


def send(page: Page, text: str) -> str:
    """Send a message and return the body of its request after the answer has ended."""
    with page.expect_request("**/v1/chat/completions") as sent:
        page.fill("#text", text)
        page.click("#send")
    expect(page.locator("#again")).to_be_enabled()
    return sent.value.post_data or ""


@needs_chromium
def test_a_conversation_has_settings_regenerate_edit_and_survives_a_reload(page: Page) -> None:
    page.select_option("#model", "sft")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0")
    body = json.loads(send(page, "hello"))
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("sft", 0, 1, 12)
    answer = page.locator(".assistant").text_content()
    assert answer and page.locator(".name").all_text_contents() == ["sft"]
    page.click("#again")
    expect(page.locator("#again")).to_be_enabled()
    assert page.locator(".assistant").all_text_contents() == [answer]  # temperature 0
    page.reload()
    assert page.locator(".message").all_text_contents() == ["hello", answer]
    expect(page.locator("#model")).to_have_value("sft")
    page.click("#edit")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#text")).to_have_value("hello")


@needs_chromium
def test_hostile_text_does_not_run_an_empty_answer_has_a_note_and_stop_ends_an_answer(page: Page) -> None:
    deltas = [{"delta": {"content": HOSTILE}}, {"delta": {}, "finish_reason": "stop"}]
    streams = [f"data: {json.dumps({'choices': [delta]})}\n\ndata: [DONE]\n\n" for delta in deltas]
    page.route(  # the third answer never comes
        "**/v1/chat/completions", lambda route: route.fulfill(body=streams.pop(0)) if streams else None
    )
    send(page, HOSTILE)
    assert page.locator(".message").all_text_contents() == [HOSTILE, HOSTILE]
    assert page.locator("#talk img, #talk script").count() == 0
    assert page.evaluate("window.hacked") is None
    page.click("#new")
    send(page, "hello")
    expect(page.locator(".note")).to_have_text("The model ended its answer without a text.")
    page.fill("#text", "hello")
    page.click("#send")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    assert page.locator("#problem").text_content() == ""


@needs_chromium
def test_two_models_answer_next_to_each_other(page: Page) -> None:
    """Each model continues its own conversation, and a new tab has a conversation of its own.

    The second list does not offer the model of the first.
    """
    offered = page.locator("#other option:enabled")
    for model, others in (("sft", ["one model", "and ppo"]), ("ppo", ["one model", "and sft"])):
        page.select_option("#model", model)
        expect(offered).to_have_text(others)
        expect(page.locator("#other")).to_have_value("")
        page.select_option("#other", others[1].removeprefix("and "))
    page.fill("#temperature", "0")
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    bodies: list[Any] = []
    for text in ("hello", "good morning"):
        send(page, text)
    assert page.locator(".name").all_text_contents() == ["ppo", "sft", "ppo", "sft"]
    answers = page.locator(".assistant").all_text_contents()
    assert answers[0] != answers[1] and all(answers)
    later = {body["model"]: [each["content"] for each in body["messages"]] for body in bodies[2:]}
    assert later == {"ppo": ["hello", answers[0], "good morning"], "sft": ["hello", answers[1], "good morning"]}
    tab = page.context.new_page()
    tab.goto(page.url)
    expect(tab.locator(".assistant")).to_have_count(4)
    tab.click("#new")
    page.reload()
    expect(page.locator(".assistant")).to_have_count(4)
    expect(page.locator("#other")).to_have_value("sft")


@needs_chromium
def test_a_reload_in_the_middle_of_an_answer_keeps_its_beginning(
    page: Page, models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = pause_after(4, models["ppo"], monkeypatch)
    page.fill("#temperature", "0")  # four sampled tokens may be the beginning of one character, which has no text
    page.fill("#text", "hello")
    page.click("#send")
    expect(page.locator(".assistant")).not_to_have_text("")
    page.reload()
    expect(page.locator(".note")).to_have_text("This answer is not complete.")
    assert page.locator(".assistant").text_content()
    go_on.set()
    page.click("#again")
    expect(page.locator("#again")).to_be_enabled()
    assert page.locator(".note").count() == 0 and page.locator(".assistant").text_content()


@needs_chromium
def test_the_oldest_turns_are_left_out_if_the_context_is_full(page: Page) -> None:
    """The model has 256 positions, so two answers of 240 tokens do not fit.

    A message longer than the context has one explanation.
    """
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "240")
    send(page, "hello")
    assert page.locator(".note").count() == 0
    body = json.loads(send(page, "good morning"))
    assert len(body["messages"]) == 3
    expect(page.locator(".note")).to_have_text("The first turns are left out, because the context is full.")
    assert page.locator(".assistant").last.text_content() and page.locator("#problem").text_content() == ""
    send(page, "hello " * 500)
    expect(page.locator(".note").last).to_have_text("This answer is not complete.")
    expect(page.locator("#problem")).to_contain_text("send a shorter prompt")


@needs_chromium
def test_people_vote_in_two_tabs(arena: Page, votes: VoteFile) -> None:
    expect(arena.locator("#rate")).to_have_text("No votes on ppo and sft yet.")
    tab = open_arena(arena.context.new_page(), arena.url)
    for number, each in enumerate((arena, tab)):
        each.fill("#text", f"hello {number}")
        each.keyboard.press("Enter")
    for number, each in enumerate((arena, tab)):
        expect(each.locator("#ballot")).to_be_visible()
        assert each.locator(".user").text_content() == f"hello {number}"
        assert each.locator(".name:visible").all_text_contents() == ["Answer A", "Answer B"]
        each.fill("#comment", HOSTILE)
        each.click("button[value=neither]" if number else "button[value=both]")
        expect(each.locator("#ballot")).to_be_hidden()
        assert {text.partition(": ")[2] for text in each.locator(".side .name").all_text_contents()} == {"ppo", "sft"}
    expect(tab.locator("#rate")).to_contain_text("0 for ppo, 0 for sft, 1 for both, 1 for neither")
    rows = list(votes.rows())
    assert [row["prompt"][0]["content"] for row in rows] == ["hello 0", "hello 1"]
    assert [row["vote"] for row in rows] == ["both", "neither"] and rows[0]["comment"] == HOSTILE


@needs_chromium
def test_a_reload_in_the_middle_of_a_round_continues_it(
    arena: Page, models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch, votes: VoteFile
) -> None:
    go_on = [pause_after(6, model, monkeypatch) for model in models.values()]
    arena.fill("#temperature", "0")  # six sampled tokens may have no visible text
    arena.fill("#text", "hello")
    arena.click("#send")
    expect(arena.locator(".assistant")).to_have_text([re.compile("."), re.compile(".")])
    arena.reload()
    expect(arena.locator(".user")).to_have_text("hello")
    for event in go_on:
        event.set()
    expect(arena.locator("#ballot")).to_be_visible()
    arena.click("button[value=both]")
    expect(arena.locator("#thanks")).to_have_text("You chose both answers.")
    (row,) = votes.rows()
    assert arena.locator(".assistant").all_text_contents() == [row[side]["answer"] for side in ("left", "right")]
    arena.reload()
    expect(arena.locator("#thanks")).to_have_text("You chose both answers.")


@needs_chromium
def test_hostile_answers_and_names_do_not_run(arena: Page) -> None:
    events = [{"side": side, "text": HOSTILE} for side in (0, 1)] + [{"done": True, "problem": None, "result": None}]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    tally = {"first": HOSTILE, "second": HOSTILE, "votes": 1, "rate": 1, "low": 0, "high": 1, "wins": 1, "losses": 0,
             "both": 0, "neither": 0}  # fmt: skip
    arena.route("**/arena/rounds/*", lambda route: route.fulfill(body=stream))
    arena.route("**/arena/votes", lambda route: route.fulfill(
        json={"vote": HOSTILE, "names": [HOSTILE, HOSTILE], "tally": tally}))  # fmt: skip
    arena.fill("#text", HOSTILE)
    arena.click("#send")
    expect(arena.locator("#ballot")).to_be_visible()
    arena.click("button[value=both]")
    expect(arena.locator("#rate")).to_contain_text(HOSTILE)
    assert arena.locator(".message").all_text_contents() == [HOSTILE] * 3
    assert arena.locator("body img, main script").count() == 0 and arena.evaluate("window.hacked") is None


@needs_chromium
def test_a_phone_shows_every_column_of_a_report_and_a_chart_on_the_whole_screen(tab: Page, tmp_path: Path) -> None:
    write_demo_run(tmp_path)
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.goto(write_report(tmp_path).as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.evaluate(CUT_OFF) == []
    row = tab.locator("#changes tbody tr").first
    texts = row.locator("td").all_inner_texts()
    names = [each.get_attribute("data-label") for each in row.locator("td").all()]
    assert names[0] == "Change" and names[-1] == "worse" and len(texts) == len(names) == 8
    chart = tab.locator("#ppo figure").first
    assert chart.bounding_box()["width"] < 390
    chart.locator("strong a").click()
    box = chart.bounding_box()
    assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 390, 844)
    tab.get_by_text("Close").locator("visible=true").click()
    assert chart.bounding_box()["width"] < 390
    assert 0 <= chart.bounding_box()["y"] < 844  # the page is where it was
