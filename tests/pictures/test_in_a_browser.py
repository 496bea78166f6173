"""The pages in headless Chromium."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import run
from helpers.serving import served

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
