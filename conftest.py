"""What tests and notebooks share: results go to a folder of their own, and nbval compares what can
be compared."""

import os
import tempfile
from pathlib import Path

import pytest

# Notebooks under test write tables and figures; the project's own files stay as they are.
if not os.environ.get("SPECNB_OUT"):
    os.environ["SPECNB_OUT"] = tempfile.mkdtemp(prefix="specnb-")
# Tests run side by side, one thread each; set before torch is imported, and inherited by notebooks.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of a test go to its own folder."""
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))


def pytest_configure(config: pytest.Config) -> None:
    """Addresses in outputs are not compared, also when pytest is called by hand, from any
    folder."""
    if getattr(config.option, "nbval_sanitize_with", "") is None:
        config.option.nbval_sanitize_with = str(config.rootpath / "tests" / "sanitize.cfg")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Pictures and progress bars are not compared as text."""
    if collector.fspath and collector.fspath.ext == ".ipynb":
        collector.skip_compare += ("image/svg+xml", "stderr")  # type: ignore[attr-defined]  # nbval has it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take minutes start first: at the end one process would be left with them."""
    items.sort(key=lambda item: item.get_closest_marker("minutes") is None)
