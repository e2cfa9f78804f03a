"""As a newcomer would: `make notebooks`, JupyterLab in a browser, notebook 06, Run All, the picture.

    python tests/notebooks/browse.py [FOLDER]      # writes screenshots there; prints the seconds

No test: it needs a browser, a minute, and somebody who looks at the pictures. It fails if the
picture is not there within three minutes, if a cell fails, or if a process is left behind.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "06_trace_1f1b.ipynb"
SECONDS = 180


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    before, begun = NOTEBOOK.read_bytes(), time.monotonic()
    command = ["make", "notebooks", "PORT=8897"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=os.environ | {"BROWSER": "true"},
    )  # fmt: skip
    try:
        address = read_address(server)
        print(f"{time.monotonic() - begun:6.1f} s  JupyterLab is at {address.split('?')[0]}")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.goto(address.replace("01_ranks_and_groups", NOTEBOOK.stem))
            run_all(page, folder, begun)
            browser.close()
    finally:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
        NOTEBOOK.write_bytes(before)  # JupyterLab saves outputs into it
    left = subprocess.run(["pgrep", "-s", str(server.pid)], capture_output=True, text=True).stdout
    assert not left, f"left behind: {left.split()}"
    print(f"screenshots are in {folder}")


def read_address(server: subprocess.Popen) -> str:
    lines = []
    for line in server.stdout:
        lines.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+\S+token=\w+", line):
            return found[0]
    raise SystemExit("make notebooks printed no address:\n" + "".join(lines))


def run_all(page: Page, folder: Path, begun: float) -> None:
    page.wait_for_selector(".jp-NotebookPanel .jp-MarkdownOutput h1", timeout=SECONDS * 1000)
    page.screenshot(path=folder / "1-opened.png")
    print(f"{time.monotonic() - begun:6.1f} s  the notebook is open")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    # The last cell of code has a number once all have run.
    give_up = begun + SECONDS
    while time.monotonic() < give_up:
        status = page.evaluate(
            """() => ({
              pictures: document.querySelectorAll('.jp-OutputArea-output img').length,
              errors: document.querySelectorAll('.jp-OutputArea-output[data-mime-type*=stderr],'
                + ' .jp-RenderedText[data-mime-type="application/vnd.jupyter.error"]').length,
              prompts: [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
                .map(e => e.textContent),
            })"""
        )
        assert not status["errors"], "a cell failed"
        if status["pictures"]:
            break
        time.sleep(0.3)
    else:
        page.screenshot(path=folder / "2-no-picture.png")
        raise SystemExit(f"no picture within {SECONDS} s; prompts: {status['prompts']}")
    seconds = time.monotonic() - begun
    page.locator(".jp-OutputArea-output img").first.scroll_into_view_if_needed()
    time.sleep(1)
    page.screenshot(path=folder / "2-picture.png")
    print(f"{seconds:6.1f} s  the picture is there")
    deadline = time.monotonic() + 60
    while "[*]" in "".join(status["prompts"]) and time.monotonic() < deadline:
        time.sleep(0.5)
        status["prompts"] = page.locator(".jp-CodeCell .jp-InputPrompt").all_text_contents()
    page.screenshot(path=folder / "3-end.png")
    print(f"{time.monotonic() - begun:6.1f} s  prompts: {' '.join(status['prompts'])}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="browse-")))
