"""The chat page in a real headless Chromium: streaming, stop, regenerate, edit, reload, hostile text."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from pipeline.chat.command import main
from pipeline.chat.folder import ChatModel
from pipeline.serve.app import create_app
from pipeline.serve.command import find_all
from pipeline.serve.models import ServedModel, load_served
from tests.pipeline.serve.running import LIMIT, served
from tests.test_chat import save_model, write_manifest

CHROMIUM = Path("/usr/bin/chromium")
SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
needs_chromium = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: install Debian's chromium package"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("ppo", "sft")):
        save_model(root / name, seed)
    return {name: load_served(ChatModel(name, root / name), 4, None) for name in ("ppo", "sft")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, models: dict[str, ServedModel]) -> Iterator[Page]:
    expect.set_options(timeout=LIMIT * 1000)
    with served(create_app(models, key=None)) as url:
        page = browser.new_page()
        page.set_default_timeout(LIMIT * 1000)
        page.goto(url)
        expect(page.locator("#model option")).to_have_count(2)
        page.locator("summary").click()
        page.fill("#max_tokens", "12")
        yield page
        page.close()


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
def test_hostile_text_is_shown_and_does_not_run(page: Page) -> None:
    event = json.dumps({"choices": [{"delta": {"content": HOSTILE}}]})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {event}\n\ndata: [DONE]\n\n"))
    send(page, HOSTILE)
    assert page.locator(".message").all_text_contents() == [HOSTILE, HOSTILE]
    assert page.locator("#talk img, #talk script").count() == 0
    assert page.evaluate("window.hacked") is None


@needs_chromium
def test_stop_ends_an_answer(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: None)  # an answer that never comes
    page.fill("#text", "hello")
    page.click("#send")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    assert page.locator("#problem").text_content() == ""


def test_the_page_offers_all_finished_stages_newest_first(tmp_path: Path) -> None:
    for stage in ("sft", "ppo"):
        (tmp_path / stage / "model").mkdir(parents=True)
        (tmp_path / stage / "model" / "config.json").write_text("{}")
    write_manifest(tmp_path, sft="finished", reward="finished", ppo="finished")
    assert [model.name for model in find_all(tmp_path)] == ["ppo", "sft"]
    assert [model.name for model in find_all(tmp_path / "sft")] == ["sft"]


def test_other_addresses_need_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ZEROCHAT_KEY", raising=False)
    assert main([str(tmp_path), "--web", "--host", "0.0.0.0"]) == 2
    assert "--host 0.0.0.0 lets other machines connect, so a key is needed" in capsys.readouterr().err


def test_with_a_key_only_the_page_is_open(models: dict[str, ServedModel]) -> None:
    with served(create_app(models, key="k")) as url:
        with urllib.request.urlopen(url, timeout=LIMIT) as response:
            assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/v1/models", timeout=LIMIT)
