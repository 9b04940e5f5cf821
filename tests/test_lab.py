"""`make lab` in a browser: pictures are seen, cells run, figures move, and committed files stay as they
are."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from script_files import ROOT

LAB, TOKEN = ROOT / "build/lab-test", "token"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 300  # seconds for what takes ten on an idle machine
# All cells are on the page, not only those in view.
SETTINGS = {"@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium"),
    pytest.mark.filterwarnings("default"),  # of the browser's driver
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`make lab`, in another folder than a reader's copies and without a reader's settings."""
    shutil.rmtree(LAB, ignore_errors=True)
    settings = tmp_path_factory.mktemp("settings")
    for name, content in SETTINGS.items():
        (settings / name).parent.mkdir(parents=True)
        (settings / name).write_text(json.dumps(content))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--no-browser --port={port} --ServerApp.port_retries=0 --IdentityProvider.token={TOKEN}"
    command = ["make", "-o", ".venv/ready", "lab", f"LAB={LAB.relative_to(ROOT)}", f"OPTIONS={options}"]
    given = os.environ | {"JUPYTERLAB_SETTINGS_DIR": str(settings)}
    log = settings / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, cwd=ROOT, env=given, stdout=file, stderr=file, start_new_session=True) as server,
    ):
        try:
            ready = until(lambda: server.poll() is not None or listens(port))
            assert ready, log.read_text()
            assert server.poll() is None, log.read_text()
            # In a workspace of its own, or JupyterLab opens again, hidden, what another test had open.
            yield f"http://127.0.0.1:{port}/lab/workspaces/{{0}}/tree/notebooks/{{0}}.ipynb?token={TOKEN}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def until(done: Any, pause: float = 0.5) -> bool:
    """Whether `done()` became true in time."""
    end = time.monotonic() + PATIENCE
    while not (found := done()) and time.monotonic() < end:
        time.sleep(pause)
    return bool(found)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In a container, root has no sandbox and /dev/shm is small.
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.mark.parametrize("name", ["00_quickstart", "04_cost_and_gamma"])
def test_a_notebook_is_seen_run_and_moved(name: str, address: str, browser: Any) -> None:
    before = git_status()
    path = LAB / f"notebooks/{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":  # so that outputs are those of this run
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(address.format(name))

    # The picture on the first screen.
    page.wait_for_function("document.querySelector('.jp-MarkdownCell img')?.naturalWidth > 0")

    # All cells.
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    page.locator(".lm-MenuBar-itemLabel").get_by_text("Run", exact=True).click()
    page.locator("[data-command='runmenu:run-all']").click()

    def saved() -> list[Any]:
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1000)
        return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]

    def errors() -> list[Any]:
        return [output for cell in saved() for output in cell.outputs if output.output_type == "error"]

    assert until(lambda: errors() or saved()[-1].execution_count), "the notebook did not end"
    assert not errors()
    assert not [cell.source for cell in saved() if cell.source and not cell.execution_count]

    # A figure that moves.
    figure = page.locator(".specnb-widget").first
    figure.scroll_into_view_if_needed()
    slider, drawn = figure.locator("input[type=range]").first, figure.locator("svg").first
    still = drawn.inner_html()
    slider.focus()
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    assert until(lambda: drawn.inner_html() != still)
    page.close()
    assert git_status() == before


def git_status() -> str:
    """What has changed of all that notebooks show and write."""
    command = ["git", "status", "--porcelain", "--", "notebooks", "figures", "data", "audit"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
