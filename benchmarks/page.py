"""How long the page of a pipeline takes to open: pp 16, v 8, 32 micro-batches, in headless Chromium without a network.

From the start of loading to the end of the first complete drawing, as the page itself says (`data-ready`); several
openings, since a machine is noisy. Needs Chromium on the PATH and the package playwright.

    ./run bench page
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from fourfold.layout import generate
from fourfold.report.page import write_page
from fourfold.report.schedule import schedule_page

BAR = 2.0  # seconds
OPENINGS = 5


def opened(path: Path) -> list[float]:
    """Seconds of each opening."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(OPENINGS):
            page = browser.new_page(viewport={"width": 1920, "height": 1080})
            page.context.set_offline(True)
            page.goto(path.as_uri())
            page.wait_for_selector("body[data-ready]", state="attached")
            found.append(float(page.evaluate("document.body.dataset.ready")) / 1000)
            page.close()
        browser.close()
    return found


def main() -> None:
    """Runs all."""
    if shutil.which("chromium") is None:
        raise SystemExit("no chromium on the PATH")
    schedule = generate(pp=16, v=8, num_micro_batches=32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.html"
        began = time.perf_counter()
        write_page(schedule_page(schedule), path)
        made = time.perf_counter() - began
        seconds = opened(path)
        size = path.stat().st_size
    boxes = 2 * schedule.num_stages * schedule.num_micro_batches
    print(f"{boxes:,} boxes: written in {made:.2f} s, {size / 1e3:,.0f} kB")
    print(f"opened in {min(seconds):.2f} to {max(seconds):.2f} s, bar {BAR:g} s")


if __name__ == "__main__":
    main()
