"""The playground in headless Chromium. Skipped, with the reason, if it is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api as api

from tests.front.fakes import byte_tokenizer
from tests.front.live import SMALL
from tests.front.test_process import Server, running, wait

pytestmark = pytest.mark.browser

QUESTION = "List 3 countries and their capitals."
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def window() -> Iterator[api.BrowserContext]:
    """One for all tests: Chromium draws a window of its own for each, which takes a second."""
    names = ("chromium", "chromium-browser", "google-chrome")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = own if Path(own).exists() else next(filter(None, map(shutil.which, names)), None)
        if path is None:
            pytest.skip("there is no Chromium (playwright install chromium)")
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with opened.new_context(viewport={"width": 1280, "height": 800}) as context:
            context.new_page()  # it stays, so that the window does
            yield context
        opened.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The bundled model."""
    command = "-m", "specserve.launch", "--port", "0", "--device", "cpu", "--speculative-algorithm", "EAGLE3"
    found = Server([*command, *SMALL])
    try:
        yield found.wait_ready()
    finally:
        found.stop()


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A fake that repeats the prompt, a message every 20 ms, and wants a key."""
    model = tmp_path_factory.mktemp("models") / "tiny"
    byte_tokenizer().save_pretrained(model)
    with running("build_slow", model, "--served-model-name", "tiny", "--api-key", "key") as found:
        yield found.wait_ready()


@pytest.fixture
def page(window: api.BrowserContext) -> Iterator[api.Page]:
    """Fails a test whose page throws or breaks its policy. Requests that fail are the page's to tell."""
    found, errors = window.new_page(), []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    found.set_default_timeout(PATIENCE_MS)
    yield found
    found.close()
    assert not [error for error in errors if "Failed to load resource" not in error]


def visit(page: api.Page, server: Server, model: str = "specserve-chat") -> None:
    page.goto(server.url + "/")
    api.expect(page.locator("#status")).to_have_text(model, timeout=PATIENCE_MS)


def answered(page: api.Page) -> None:
    page.locator(".answer").first.wait_for()
    page.locator("#send").wait_for()


def give_key(page: api.Page) -> None:
    api.expect(page.get_by_label("API key")).to_be_focused(timeout=PATIENCE_MS)
    page.keyboard.type("key")
    page.keyboard.press("Tab")
    api.expect(page.locator("#status")).to_have_text("tiny", timeout=PATIENCE_MS)


def test_coloured_runs_and_figures(page: api.Page, server: Server) -> None:
    visit(page, server)
    api.expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("List 6 countries and their capitals.")
    page.keyboard.press("Enter")
    answered(page)
    answer = page.locator(".answer")
    assert answer.locator(".token.d1").count() > 3
    assert answer.locator(".token.d3").count() > 0
    assert answer.locator(".token.bonus").count() > 1
    assert answer.locator(".text").inner_text().startswith("1. ")
    drafts, bonus = answer.locator(".token.d1").first, answer.locator(".token.bonus").first
    colour = "element => getComputedStyle(element).backgroundColor"
    assert drafts.evaluate(colour) != bonus.evaluate(colour)
    figures = dict(
        zip(answer.locator("dt").all_inner_texts(), answer.locator("dd").all_inner_texts(), strict=True)
    )
    assert set(figures) == {"tokens/s", "first token", "tokens/step", "tokens"}
    assert float(figures["tokens/step"]) > 1.5
    assert float(figures["tokens/s"]) > 1
    assert answer.locator(".chart rect").count() > int(figures["tokens"]) * 0.8
    assert "drafted tokens accepted" in answer.inner_text()


def test_side_by_side_is_identical(page: api.Page, server: Server) -> None:
    visit(page, server)
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_text("Side by side").click()
    page.get_by_role("button", name=QUESTION).click()
    answered(page)
    api.expect(page.locator(".verdict")).to_contain_text("The texts are identical", timeout=PATIENCE_MS)
    speculated, plain = page.locator(".answer").all()
    assert speculated.locator(".text").inner_text() == plain.locator(".text").inner_text()
    assert speculated.locator(".token.d1").count() > 0
    assert plain.locator(".token.d1").count() == 0
    assert plain.locator(".token.bonus").count() > 0


def test_a_conversation_goes_on_and_begins_anew(page: api.Page, server: Server) -> None:
    visit(page, server)
    sent = []
    page.on(
        "request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None
    )
    page.get_by_label("System prompt").fill("Be brief.")
    for text in ("What is the capital of France?", "And of Spain?"):
        page.get_by_label("Message").fill(text)
        page.keyboard.press("Enter")
        answered(page)
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".answer").count() == 0
    page.get_by_role("button", name=QUESTION).click()
    answered(page)
    assert [message["role"] for message in sent[2]["messages"]] == ["system", "user"]


def test_code_is_a_block_and_answers_are_copied(page: api.Page, server: Server) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit(page, server)
    page.get_by_role("button", name="Write a Python function").click()
    answered(page)
    api.expect(page.locator(".text pre:visible")).to_have_count(1)
    shown = page.locator(".text").inner_text()
    code = page.locator(".text pre").first.inner_text()
    assert code.startswith("def is_prime")
    assert "`" not in shown
    assert shown.strip().startswith(code.strip())
    assert shown.strip() != code.strip()
    for title, copied in (("Copy the answer", "```python"), ("Copy the code", "def is_prime")):
        page.get_by_title(title).click()
        api.expect(page.get_by_title(title)).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()").startswith(copied)


def choice(delta: dict[str, Any], *pieces: str) -> dict[str, Any]:
    """A choice that has the tokens of one step."""
    return {"index": 0, "delta": delta, "speculation": {"runs": [len(pieces)], "pieces": pieces}}


CALL = [
    choice({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "weather", "arguments": ""}}]}, "x"),
    choice({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}, "x"),
    choice({"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}, "x"),
]


def answer_with(page: api.Page, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer each question with a stream of these, between comments. Return the requests, which grow as they come."""
    sent = []

    def answer(route: api.Route) -> None:
        sent.append(route.request.post_data_json)
        chunks = [json.dumps({"choices": [each]}) for each in choices]
        lines = [f": alive\n\ndata: {each}\n\n" for each in (*chunks, "[DONE]")]
        route.fulfill(body="".join(lines), content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    return sent


def test_tools_json_and_a_server_without_drafts(page: api.Page, server: Server) -> None:
    """A call is a block of its own, and stays in the conversation; what comes in one read has no speed."""
    sent = answer_with(page, CALL)
    page.route("**/server_info", lambda route: route.fulfill(json={"speculative_algorithm": "NONE"}))
    visit(page, server)
    assert not page.get_by_text("Side by side").is_visible()
    page.get_by_label("Tools").fill("[{]")
    page.get_by_label("Message").fill("Rome?")
    page.keyboard.press("Enter")
    api.expect(page.get_by_label("Tools")).to_be_focused()
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "weather"}}]')
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    page.get_by_label("Message").press("Enter")
    answered(page)
    assert page.locator(".answer h3").inner_text() == "Answer"
    assert page.locator(".call").inner_text() == 'weather {"city": "Rome"}'
    assert page.locator("dd").first.inner_text() == "–"
    assert sent[0]["tools"][0]["function"] == {"name": "weather"}
    assert sent[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    ask(page, "And?")
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert sent[1]["messages"] == [
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "user", "content": "And?"},
    ]


def ask(page: api.Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    answered(page)


STEPS = [
    ("A ", "**", "bold"),
    ("** [link](https://a.example) and ", "[none](javascript:alert)\n\n"),
    ("| a |\n|---|\n", "| b |\n\n"),
    ("2", ". two\n", "   - <img src=x onerror=alert(1)>\n\n"),
    ("```py\n", "x =", " 1"),
]


def test_markdown_in_colours_and_without(page: api.Page, server: Server) -> None:
    """Each character keeps its token's colour, and HTML is text. Settings survive a reload, faulty ones too."""
    thought = choice({"reasoning_content": "A **b"}, "<think>", "A **b", "</think>")
    answer_with(page, [thought, *(choice({"content": "".join(step)}, *step) for step in STEPS)])
    visit(page, server)
    ask(page, "a")
    text = page.locator(".answer .text")
    assert text.locator("strong .token.bonus").inner_text() == "bold"
    assert text.locator("a").evaluate_all("all => all.map((each) => each.href)") == ["https://a.example/"]
    assert text.locator("td .token.bonus").inner_text() == "b"
    assert text.locator("ol > li > .marker .token").first.inner_text() == "2"
    assert text.locator("ul").inner_text() == "<img src=x onerror=alert(1)>"
    assert text.locator("img").count() == 0
    assert text.locator(".code pre .token").all_inner_texts() == ["x =", " 1"]
    assert page.locator(".reasoning").inner_text() == "Reasoning\nA **b"
    colours = "all => new Set(all.map((each) => getComputedStyle(each).backgroundColor)).size"
    assert text.locator(".token").evaluate_all(colours) > 2
    page.get_by_role("checkbox", name="Colours").uncheck()
    assert text.locator(".token").evaluate_all(colours) == 1
    page.reload()
    assert not page.get_by_role("checkbox", name="Colours").is_checked()
    page.get_by_label("Tools").fill("[{")
    page.get_by_label("Message").focus()
    page.reload()
    page.get_by_label("Message").fill("b")
    page.keyboard.press("Enter")
    api.expect(page.get_by_label("Tools")).to_be_focused()
    assert text.locator("strong").inner_text() == "bold"


def test_a_reload_regenerate_and_edit(page: api.Page, server: Server) -> None:
    visit(page, server)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_text("Side by side").click()
    ask(page, "What is the capital of France?")
    ask(page, "And of Spain?")
    before = page.locator("#talk").inner_html()
    page.reload()
    api.expect(page.locator("#status")).to_have_text("specserve-chat", timeout=PATIENCE_MS)
    assert page.locator("#talk").inner_html() == before
    assert page.get_by_label("System prompt").input_value() == "Be brief."
    sent = answer_with(page, [choice({"content": "Rome."}, "Rome.")])
    page.get_by_role("button", name="Regenerate").click()
    api.expect(page.locator(".turn").nth(1)).to_contain_text("Rome.")
    answered(page)
    page.get_by_role("button", name="Edit").first.click()
    page.keyboard.press("Escape")
    assert page.locator(".edited").count() == 0
    page.get_by_role("button", name="Edit").first.click()
    api.expect(page.get_by_label("Message")).to_have_value("What is the capital of France?")
    ask(page, "And of Italy?")
    asked = [[each["content"] for each in request["messages"] if each["role"] == "user"] for request in sent]
    assert asked == [["What is the capital of France?", "And of Spain?"], ["And of Italy?"]]
    api.expect(page.locator(".turn")).to_have_count(1)
    page.get_by_role("button", name="New chat").click()
    page.reload()
    assert page.locator("#welcome").is_visible()


def test_a_failed_question_returns_to_its_box(page: api.Page, server: Server) -> None:
    visit(page, server)
    refuse = {"error": {"message": "the queue is full"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json=refuse))
    ask(page, "Hello?")
    assert page.locator(".answer").inner_text().split("\n")[-1] == "The queue is full"
    assert page.locator(".chart").count() == 0
    api.expect(page.get_by_label("Message")).to_have_value("Hello?")
    page.unroute("**/v1/chat/completions")
    page.keyboard.press("Enter")
    api.expect(page.locator(".error")).to_have_count(0)
    answered(page)
    assert page.locator(".turn").count() == 1
    assert page.locator(".token").count() > 0
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json=refuse))
    page.get_by_role("button", name="Regenerate").click()
    api.expect(page.locator(".error")).to_be_visible()
    answered(page)
    api.expect(page.get_by_label("Message")).to_have_value("Hello?")
    page.keyboard.press("Escape")
    page.reload()
    api.expect(page.locator(".turn")).to_have_count(1)
    assert page.locator(".token").count() > 0


def test_a_reload_keeps_what_has_arrived(page: api.Page, slow_server: Server) -> None:
    page.goto(slow_server.url + "/")
    give_key(page)
    assert not page.get_by_text("Side by side").is_visible()
    page.get_by_label("Message").fill("abc")
    page.keyboard.press("Enter")
    page.locator(".token").nth(10).wait_for(state="attached")
    page.reload()
    api.expect(page.locator(".answer")).to_contain_text("Stopped.")
    assert page.locator(".token").count() > 10
    api.expect(page.locator("#status")).to_have_text("tiny", timeout=PATIENCE_MS)
    wait(lambda: slow_server.running() == 0, 5)


def test_phone_has_no_sideways_scroll(page: api.Page, server: Server) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    visit(page, server)
    page.get_by_text("Side by side").click()
    page.get_by_label("Message").fill("What is " + "unbreakable" * 20)
    page.keyboard.press("Enter")
    answered(page)
    assert fits(page)
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").is_visible()
    assert fits(page)


def fits(page: api.Page) -> bool:
    boxes = "[document.documentElement, ...document.querySelectorAll('#talk, #settings, .answer')]"
    return bool(page.evaluate(f"{boxes}.every((box) => box.scrollWidth <= box.clientWidth)"))


def test_a_field_that_is_wrong_sends_nothing(page: api.Page, server: Server) -> None:
    visit(page, server)
    page.get_by_label("Top p").fill("2")
    page.get_by_label("Message").fill("Hello")
    page.keyboard.press("Enter")
    api.expect(page.get_by_label("Top p")).to_be_focused()
    assert page.locator(".turn").count() == 0


def test_errors_are_words(page: api.Page, server: Server) -> None:
    visit(page, server)
    page.get_by_label("Message").fill("long " * 9000)
    page.keyboard.press("Enter")
    answered(page)
    api.expect(page.locator(".error")).to_contain_text("context length")


def test_key_escape_and_no_mouse(page: api.Page, slow_server: Server) -> None:
    """The key is asked for, Escape ends the answer in the server too, and model output is never markup."""
    page.goto(slow_server.url + "/")
    give_key(page)
    while page.evaluate("document.activeElement.id") != "question":
        page.keyboard.press("Tab")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(f"{outline} !== 'none' || document.activeElement.name === 'mode'")
    page.keyboard.type("<b>x</b>")
    page.keyboard.press("Enter")
    page.locator(".token").nth(20).wait_for()
    page.keyboard.press("Escape")
    answered(page)
    api.expect(page.locator(".answer")).to_contain_text("Stopped.")
    api.expect(page.get_by_label("Message")).to_be_focused()
    assert page.locator(".answer b").count() == 0
    assert "<b>x</b>" in page.locator(".answer .text").inner_text()
    wait(lambda: slow_server.running() == 0, 5)
    assert page.evaluate("localStorage.length") == 0
    assert page.evaluate("Object.keys(sessionStorage).sort()") == [
        "specserve-conversation",
        "specserve-settings",
    ]


def test_the_stop_button_ends_both_sides(page: api.Page, slow_server: Server) -> None:
    page.route("**/server_info", lambda route: route.fulfill(json={"speculative_algorithm": "EAGLE3"}))
    page.goto(slow_server.url + "/")
    give_key(page)
    page.get_by_text("Side by side").click()
    page.get_by_label("Message").fill("a")
    page.keyboard.press("Enter")
    page.locator(".token").nth(5).wait_for()
    page.get_by_role("button", name="Stop").click()
    answered(page)
    assert page.locator(".verdict").count() == 0
    assert page.locator(".figures").count() == 1
    wait(lambda: slow_server.running() == 0, 5)


def test_the_reader_who_scrolls_up_stays_there(page: api.Page, slow_server: Server) -> None:
    page.goto(slow_server.url + "/")
    give_key(page)
    page.get_by_label("Message").fill("line\n" * 12)
    page.keyboard.press("Enter")
    page.locator(".token").nth(100).wait_for(state="attached")
    talk = page.locator("#talk")
    below = "box => box.scrollHeight - box.clientHeight - box.scrollTop"
    assert talk.evaluate("box => box.scrollTop") > 0
    assert talk.evaluate(below) < 40
    talk.evaluate("box => { box.scrollTop = 0; }")
    page.locator(".token").nth(160).wait_for(state="attached")
    assert talk.evaluate("box => box.scrollTop") == 0


def test_server_that_is_gone(page: api.Page, slow_server: Server) -> None:
    page.goto(slow_server.url + "/")
    give_key(page)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_label("Message").fill("a")
    page.keyboard.press("Enter")
    api.expect(page.locator(".error")).to_have_text("The server can’t be reached. Is it running?")
    page.unroute("**/v1/chat/completions")
