"""Takes the pictures of docs/dashboard.md: `python tools/screens.py`, with what `$HIVETUNE_HOME` holds (make demo).

A page for each name, in Debian's Chromium; the pictures are as wide as a page of the documentation.
"""

import json
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from hivetune.dashboard.watched import Watcher

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH, HEIGHT = 900, 700


def main() -> None:
    runs = Watcher().runs()
    if not runs:
        sys.exit("this home has no run; make one first: make demo")
    pages = {"run": f"runs/{runs[0][0]}", "evaluation": f"runs/{runs[0][0]}/evaluation"}
    command = [sys.executable, "-m", "hivetune", "dashboard", "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = json.loads(server.stdout.readline())
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
            page = context.new_page()
            page.goto(f"{said['url']}login?token={said['token']}")
            for name, path in pages.items():
                page.goto(said["url"] + path)
                page.screenshot(path=IMAGES / f"dashboard-{name}.png")
            browser.close()
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
