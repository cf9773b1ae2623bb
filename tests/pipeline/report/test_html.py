"""Text from models and files cannot become a tag, a script or a request."""

import base64
import hashlib
import re

from pipeline.report.html import Markup, clean, document, element


def test_text_and_attributes_are_escaped_and_markup_is_not() -> None:
    inner = element("b", "<i>")
    assert inner == "<b>&lt;i&gt;</b>"
    assert element("p", "a & b ", inner) == "<p>a &amp; b <b>&lt;i&gt;</b></p>"
    assert element("a", "x", href='"><script>') == '<a href="&quot;&gt;&lt;script&gt;">x</a>'


def test_a_plain_string_joined_to_markup_is_escaped_again() -> None:
    joined = element("b", "x") + "<script>"
    assert not isinstance(joined, Markup)
    assert "<script>" not in element("p", joined)


def test_controls_surrogates_and_direction_overrides_become_visible() -> None:
    assert clean("a\u202eb\x1b[0m\ud800\x00") == "a\ufffdb\ufffd[0m\ufffd\ufffd"
    assert clean("line\n\ttab é 漢字 مرحبا 👍") == "line\n\ttab é 漢字 مرحبا 👍"


def test_the_policy_allows_only_the_style_sheet() -> None:
    page = document("t", element("p", "x"))
    sheet = re.search(r"<style>(.*)</style>", page, re.S)
    assert sheet is not None
    digest = base64.b64encode(hashlib.sha256(sheet[1].encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].replace("&#x27;", "'").split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
