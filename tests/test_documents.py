"""What documents, hooks and tables name is there: paths, places in pages, modules, commands, claims, notebooks."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
import pytest
import yaml
from script_files import ROOT

from notebooks.support.findings import all_claims
from studies.files import notebooks
from studies.study import names as studies

FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT, check=True, capture_output=True, text=True,
).stdout.splitlines()  # fmt: skip
PATHS = {*FILES, *(str(folder) for file in FILES for folder in PurePosixPath(file).parents)}
TOPS = {file.split("/")[0] for file in FILES if "/" in file}
NUMBERS = {path.name[:2] for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
# The change log names what has gone.
PAGES = [file for file in FILES if file.endswith((".md", ".ipynb")) and file != "CHANGELOG.md"]
DOTTED = re.compile(r"(?:specnb|specnb_audit|studies|audit_studies|notebooks)(?:\.\w+)+(?<!\.py)(?<!\.md)")
EXAMPLES = re.compile(r"13_mine|mine\b|NAME|FOLDER|<\w+>|NN")  # stand for what a reader writes
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def words(page: str) -> str:
    """The text of a page; of a notebook its Markdown."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if not page.endswith(".ipynb"):
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def commands(page: str) -> Iterator[str]:
    """Code in the text, and lines of blocks that are no Python."""
    text = words(page)
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    for language, block in FENCE.findall(text):
        if language != "python":
            yield from block.splitlines()


def is_there(path: str, page: str = "") -> bool:
    """Whether a file or folder has this path, from the root or from a folder above `page`; * stands for
    anything."""
    pattern = EXAMPLES.sub("*", path.split("::")[0].rstrip("/"))
    homes = ["", *(f"{parent}/" for parent in PurePosixPath(page).parents)]
    if "*" not in pattern:
        return any(home + pattern in PATHS for home in homes)
    return any(fnmatch(known, home + pattern) for home in homes for known in PATHS)


def exists(name: str) -> bool:
    """Whether `specnb.rules.Rule` is a module or what one has."""
    module, rest = name, list[str]()
    while not _is_module(module):
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
        if not module:
            return False
    value: Any = import_module(module)
    for part in rest:
        if not hasattr(value, part) and part not in getattr(value, "__annotations__", {}):
            return False
        value = getattr(value, part, None)
    return True


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
ENGINES = set(pd.read_csv(ROOT / "audit/data/engines/rows.csv", dtype=str).engine)


def nothing(command: str, page: str) -> list[str]:
    """What `command`, a line of a shell or a name, points to and is not there."""
    found = []
    for token in re.findall(r"[\w./*<>-]+", re.sub(r"\w+://\S+|#.*", "", command)):
        if "/" in token and token.split("/")[0] in TOPS and not is_there(token.rstrip("."), page):
            found.append(token)
        if DOTTED.fullmatch(token) and not exists(token):
            found.append(token)
    for target in re.findall(r"(?:^|&& |`)make (?:-j \d+ )?(?:[A-Z]+=\S+ )*([a-z]+)", command):
        found += [] if target in TARGETS else [f"make {target}"]
    for kind, value in re.findall(r"\b(ONLY|ENGINE)=(\w+)", command):
        known = {*studies(), "NAME"} if kind == "ONLY" else {*ENGINES, "NAME"}
        found += [] if value in known else [f"{kind}={value}"]
    for study in re.findall(r"python -m studies (\w+)", command):
        found += [] if study in {*studies(), "NAME", "all"} else [f"study {study}"]
    for module in re.findall(r"python -m ((?:studies|audit_studies)\.[\w.]+)", command):
        found += [] if exists(module) else [module]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    missing = [f"{name} in `{command}`" for command in commands(page) for name in nothing(command, page)]
    numbers = re.findall(r"\bnotebooks? (\d\d(?:(?:, | and | to )\d\d)*)", words(page))
    missing += [f"notebook {one}" for some in numbers for one in re.findall(r"\d\d", some) if one not in NUMBERS]
    assert not missing


SCRIPTS = [
    file for file in FILES if file.startswith(".github/") or file in (".ci/run", "audit/docs/audit-workflow.yml")
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_calls_is_there(script: str) -> None:
    lines = [line.strip().removeprefix("- ").removeprefix("run: ") for line in words(script).splitlines()]
    assert not [f"{name} in `{line}`" for line in lines for name in nothing(line, script)]
    if script.startswith(".github/"):
        jobs = yaml.safe_load(words(script))["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        assert all(("uses" in step) != ("run" in step) for step in steps)


def places(page: str) -> set[str]:
    """The addresses of the headings of a page, as GitHub and JupyterLab write them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", words(page)), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for path, place in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", FENCE.sub("", words(page))):
        folder = PurePosixPath(page).parent
        file = (ROOT / folder / path).resolve().relative_to(ROOT.resolve()).as_posix() if path else page
        there = file in PATHS or bool(EXAMPLES.search(path)) or path.startswith("...")
        if there and place and file.endswith((".md", ".ipynb")):
            there = re.sub(r"[^\w-]", "", place.lower()) in places(file)
        broken += [] if there else [f"{path}#{place}"]
    assert not broken


def test_the_table_of_studies_names_modules_tables_notebooks_and_claims() -> None:
    claims, missing = all_claims(), []
    for line in re.findall(r"^\| (`.*) \|$", words("studies/README.md"), re.MULTILINE):
        modules, tables, said = (cell.strip() for cell in line.split("|"))
        missing += [name for name in re.findall(r"`([\w/]+)`", modules) if f"studies/{name}.py" not in PATHS]
        for name in re.findall(r"`([\w/.]+)`", tables):
            missing += [] if name in PATHS or f"data/results/{name}.csv" in PATHS else [name]
        missing += [number for number in re.findall(r"\b\d\d\b", said) if number not in NUMBERS]
        missing += [name for name in re.findall(r"\*([\w-]+)\*", said) if name not in claims]
    assert not missing


def test_the_index_of_notebooks_names_tables() -> None:
    rows = re.findall(r"^\|.*\| ([^|]*) \|$", words("notebooks/README.md"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert named
    assert not [name for name in named if f"data/results/{name}.csv" not in PATHS]


def test_the_list_of_files_is_true() -> None:
    """In CONTRIBUTING, where a file is indented below its folder."""
    (listed,) = (block for _, block in FENCE.findall(words("CONTRIBUTING.md")) if "the library" in block)
    folder, missing, named = "", [], set()
    for line in listed.splitlines():
        entries = re.match(r" *((?:[\w./-]+(?: (?=\w+/))?)+)", line)[1].split()  # type: ignore[index]
        folder = folder if line.startswith(" ") else entries[0]
        for entry in entries:
            path = (folder if line.startswith(" ") else "") + entry
            named.add(path)
            missing += [] if is_there(path) else [path]
    assert not missing
    assert {file for file in FILES if fnmatch(file, "specnb/[a-z]*.py")} <= named


def test_hooks_watch_what_they_check() -> None:
    hooks = {
        hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    }
    for hook in hooks.values():
        for part in re.findall(r"[\w.\\/$-]+", hook.get("files", "").replace(r"\.", ".").replace(".*.", "*.")):
            watched = part.strip("$^")
            assert any(fnmatch(file, f"*{watched}*") for file in FILES), (
                f"{hook['id']} watches {part}, which is not there"
            )
        for path in re.findall(r"\btests/\S+", hook["entry"]):
            assert path in PATHS
    code = [
        file
        for file in FILES
        if re.match(r"(specnb|audit/specnb_audit|audit/audit_studies|studies|notebooks/support)/.*\.py", file)
    ]
    assert not [file for file in code if not re.search(hooks["imports"]["files"], file)]
    needed = [
        *(path.relative_to(ROOT).as_posix() for path in notebooks().values()),
        "data/claims.yml",
        "data/results/claims.csv",
    ]
    needed += [file for file in FILES if file.startswith("notebooks/support/")]
    assert not [file for file in needed if not re.search(hooks["notebooks"]["files"], file)]


NAMED = {
    "leviathan": "paper",
    "stratos": "Stratos",
    "lesson": "lesson",
    "walkthrough": "walkthrough",
    "implementation": "implementation",
}


def test_misprints_are_shown_where_their_table_says() -> None:
    table = pd.read_csv(ROOT / "data/errata.csv", dtype=str)
    missing = []
    for row in table.itertuples():
        (page,) = (f"notebooks/{name}.ipynb" for name in notebooks() if name.startswith(str(row.notebook)))
        missing += [] if NAMED[str(row.source)] in words(page) else [f"{row.source} in {page}"]
    assert not missing


def test_mutation_testing_matches_something() -> None:
    """mutmut changes only the files that its settings name."""
    changed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]["only_mutate"]
    modules = [Path(file).with_suffix("").as_posix().replace("/", ".") for file in changed]
    assert set(changed) <= PATHS
    (pattern,) = re.findall(r'mutmut run "(.+?)"', words("CONTRIBUTING.md"))
    assert [module for module in modules if fnmatch(f"{module}.x", pattern)]
