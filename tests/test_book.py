"""The sources of the book, without Sphinx: links, and what is found behind figures and claims."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from script_files import script

from notebooks.support.findings import all_claims

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def book() -> ModuleType:
    return script("docs/book.py")


@pytest.fixture(scope="module")
def pages(book: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """The words of every page, without code."""
    out = tmp_path_factory.mktemp("book").resolve()
    book.stage(out)
    texts = {path: path.read_text(encoding="utf-8") for path in [*out.rglob("*.md"), *out.rglob("notebooks/*.ipynb")]}
    for path, text in texts.items():
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
        texts[path] = re.sub(r"^```(?!{).*?^```|`[^`\n]+`", "", text, flags=re.M | re.S)
    return texts


def test_every_link_leads_somewhere(pages: dict[Path, str]) -> None:
    labels = {label for text in pages.values() for label in re.findall(r"^\(([\w-]+)\)=$", text, re.M)}
    for page, text in pages.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, place = link.partition("#")
            if "://" not in link:
                assert (page.parent / file).is_file() or not file, f"{page.name} links to {link}"
                there = pages.get((page.parent / file).resolve() if file else page, "")
                headings = re.findall(r"^#+ +(.*?) *$", there, re.M)
                places = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
                assert not place or place in labels | places, f"{page.name} links to {link}"


def test_the_table_of_claims_leads_to_every_cell_that_decides(pages: dict[Path, str]) -> None:
    (table,) = (text for path, text in pages.items() if path.name == "claims.md")
    assert re.findall(r"\(#claim-([\w-]+)\)", table) == list(all_claims())


def test_what_is_behind_a_name_is_followed_through_assignments(book: ModuleType) -> None:
    cells = [
        "from specnb.theory import solve_alpha as solved\nbase = read_table('results/engines')\nn = 3",
        "def worst(rows):\n    return solved(base)\nrows = []\nrows.append(worst(n))",
        "made = nb.table('made', base.head(n))",
        "plot(rows)\nplot(made)\nplot(n)",
    ]
    (_, engines), (_, made), (_, nothing) = book.lineage(cells, "07")[3]
    assert engines == {("data/results/engines.csv", ""): 2, ("specnb.theory", "solve_alpha"): 1}
    assert made == {("data/results/engines.csv", ""): 2, ("data/results/07_made.csv", ""): 1}
    assert not nothing
