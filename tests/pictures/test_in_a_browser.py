"""The pages in headless Chromium."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import run
from helpers.serving import served

from lookahead.pictures.figure import page_of

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("augmented")]
playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [f"--disable-{name}" for name in ("gpu", "quic", "background-networking", "component-update", "sync")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--no-first-run", *QUIET])
        yield found
        found.close()


def opened(browser: Any, address: str) -> tuple[Any, list[str]]:
    page, errors = browser.new_page(viewport={"width": 1200, "height": 900}), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.goto(address)
    return page, errors


def test_a_trace_of_500_passes(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    ran = run("trace", "--new-tokens", 700, "--temperature", 1.3, "--nodes", 6, "-o", file)
    assert ran.status == 0, ran.err
    page, errors = opened(browser, f"file://{file}")
    count = int(page.locator("#which").inner_text().split()[-1])
    page.keyboard.press("Home")
    assert page.locator("#which").inner_text() == f"Pass 0 of {count}"
    page.keyboard.press("ArrowRight")
    assert page.locator("#tree g").count() > 1
    page.keyboard.press("End")
    assert page.locator("#line").get_attribute("aria-valuenow") == str(count)
    page.keyboard.press("b")
    assert page.locator('#tree g[data-kept="true"]').count() > 1
    page.locator("#text .token").nth(5).click()
    assert page.locator("#text .here").count() >= 1
    page.locator("#line").click(position={"x": 3, "y": 30})
    assert not errors


def test_labels_do_not_overlap(browser: Any, tmp_path: Path) -> None:
    """Long tokens, wide letters, and a title and times that a reader can take in."""
    texts = ["root", "ingredients", "WWWWWWWWWWWW", "\u4e16\u754c\u4e16\u754c\u4e16\u754c\u4e16\u754c", " i", "x"]
    one = {"tokens": texts, "parents": [-1, 0, 1, 0, 3, 4], "sources": [""] + ["suffix"] * 5, "accepted": [0, 1, 2]}
    one |= {"chances": [-1, 10, 100, 99.6, 5, -1], "written": ["a", "b", "c"], "ms": [1.5, 91366.1, 0.0123, 2]}
    file = tmp_path / "page.html"
    file.write_text(page_of({"title": "tiny", "prompt": "p", "told": "S: tokens", "passes": [one]}), encoding="utf-8")
    page, errors = opened(browser, f"file://{file}")
    boxes = page.evaluate(
        """[...document.querySelectorAll("#tree g[data-node]")].map((group) =>
            [group.querySelector("rect"), ...group.querySelectorAll("text")].map((part) => {
                const { x, y, width, height } = part.getBBox(); return [x, y, x + width, y + height]; }))"""
    )
    assert len(boxes) == len(texts)
    for rect, text, *share in boxes:
        assert rect[0] <= text[0] and text[2] <= (share[0][0] if share else rect[2])
        assert not share or share[0][2] <= rect[2]
    rects = [rect for rect, *_ in boxes]
    for one_rect in rects:
        for other in rects:
            if one_rect is not other:
                apart = one_rect[2] <= other[0] or other[2] <= one_rect[0]
                assert apart or one_rect[3] <= other[1] or other[3] <= one_rect[1]
    assert "91.4 s" in page.locator("#sums").inner_text() and "forward 91.4 s" in page.locator("#told").inner_text()
    assert "keep 2 ms" in page.locator("#told").inner_text() and page.locator("#explained").inner_text() == "S: tokens"
    assert not errors


def test_the_chat_page(browser: Any) -> None:
    with served() as address:
        page, errors = opened(browser, address)
        page.get_by_text("tiny-coder").wait_for()
        page.locator("summary").click()
        page.locator("#most").fill("60")
        page.locator("#text").fill("<img src=x onerror=alert(1)> def add(a, b):")
        page.keyboard.press("Enter")
        page.wait_for_selector("article.assistant small")
        told = page.locator("article.assistant small").inner_text()
        assert "60 tokens in" in told
        assert page.locator("article img").count() == 0
        assert page.locator("article.assistant .free").count() > 0
        assert "tokens a pass" in page.locator("#figures").inner_text()
        page.locator("#lookahead").uncheck()
        page.locator("#text").fill("again")
        page.keyboard.press("Enter")
        page.locator("article.assistant small").nth(1).wait_for()
        plain = page.locator("article.assistant").nth(1)
        assert "(plain decoding)" in plain.inner_text() and plain.locator(".free").count() == 0
        page.locator("#most").fill("100000")
        page.locator("#text").fill("more")
        page.keyboard.press("Enter")
        page.wait_for_selector("article.error")
        assert "context holds 1024 tokens" in page.locator("article.error").inner_text()
        assert all("400" in error for error in errors)  # what the browser says of the refusal


def test_stopping_an_answer(browser: Any) -> None:
    with served() as address:
        page, errors = opened(browser, address)
        page.locator("summary").click()
        page.locator("#most").fill("900")
        page.locator("#temperature").fill("1.5")
        page.locator("#text").fill("def")
        page.keyboard.press("Enter")
        page.wait_for_selector("article.assistant span:visible")  # the first token may be a line break, which is not
        page.locator("#stop").click()
        page.wait_for_selector("#send:enabled")
        assert page.locator("article.assistant small").count() == 0
        assert not errors
