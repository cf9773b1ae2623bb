"""The chat page in a real headless Chromium: streaming, stop, regenerate, edit, reload, hostile text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from pipeline.chat.command import main
from pipeline.chat.folder import find_all
from pipeline.serve.app import create_app
from pipeline.serve.command import Listener
from pipeline.serve.models import ServedModel
from tests.pipeline.serve.chromium import HOSTILE, needs_chromium
from tests.pipeline.serve.running import LIMIT, pause_after, served
from tests.test_chat import empty_run, save_model


@pytest.fixture
def page(browser: Browser, models: dict[str, ServedModel]) -> Iterator[Page]:
    with served(create_app(models, key=None)) as url:
        context = browser.new_context()
        page = context.new_page()
        context.set_default_timeout(LIMIT * 1000)
        page.goto(url)
        expect(page.locator("#model option")).to_have_count(2)
        page.locator("summary").click()
        page.fill("#max_tokens", "12")
        yield page
        context.close()


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


def test_the_page_offers_all_finished_stages_newest_first(tmp_path: Path) -> None:
    empty_run(tmp_path, sft="finished", reward="finished", ppo="finished")
    assert [model.name for model in find_all(tmp_path)] == ["ppo", "sft"]
    (tmp_path / "sft" / "config.yaml").write_text("")
    assert [model.name for model in find_all(tmp_path)] == ["ppo", "sft", "base"]
    assert [model.name for model in find_all(tmp_path / "sft")] == ["sft"]


def test_the_first_address_is_that_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "mine", 0)
    greetings = []
    monkeypatch.setattr(Listener, "run", lambda _, app, greeting: greetings.append(greeting))
    assert main([str(tmp_path / "mine"), "--web"]) == 0
    assert re.match(r"chat page of mine at http://127\.0\.0\.1:\d+/, API at http", greetings[0])


@pytest.mark.parametrize(("option", "variable", "key"), [(None, "k\n", "k"), ("o ", "k", "o"), (None, "\n", None)])
def test_white_space_around_a_key_does_not_count(
    option: str | None, variable: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that a cluster mounts from a file ends with a line break, which no client can send."""
    monkeypatch.setenv("ZEROCHAT_KEY", variable)
    listener = Listener("127.0.0.1", 0, option)
    listener.socket.close()
    assert listener.key == key
