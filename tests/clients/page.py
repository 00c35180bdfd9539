"""The server's page in Chromium: python page.py URL CHROMIUM SCREENSHOT"""

import sys

from playwright.sync_api import expect, sync_playwright

url, chromium, shot = sys.argv[1:]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

with sync_playwright() as p:
    browser = p.chromium.launch(executable_path=chromium, args=FLAGS)
    page = browser.new_page(viewport={"width": 1100, "height": 700})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    expect(page.locator("#model")).to_have_text("demo")
    expect(page.locator("#engines")).to_contain_text("NORMAL", ignore_case=True)
    page.locator("textarea").first.fill("What is the capital of France?")
    page.locator("textarea").first.press("Enter")
    expect(page.locator("body")).to_contain_text("Paris", timeout=60_000)
    page.screenshot(path=shot)
    assert not errors, errors
    print(f"Chromium {browser.version}, screenshot {shot}")
