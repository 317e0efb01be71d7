"""A browser for pages, if the system has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, which starts nothing in the network; tests that need it are skipped where it is not."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no Chromium")
    quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=quiet)
        yield started
        started.close()
