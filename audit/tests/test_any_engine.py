"""Pages for engines that have no adapter: their files run, their commands exist, their tables are
the results'."""

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from script_files import script

from specnb_audit.cli import _parser, main

ROOT = Path(__file__).parents[2]
PAIR = f"{ROOT}/data/pair"


def test_the_skeleton_collects_compares_and_its_files_are_audited(tmp_path: Path) -> None:
    """A target other than the engine's is found by the logits."""
    skeleton = script("audit/docs/any_engine.py")
    vars(skeleton)["NEW_TOKENS"] = 4
    given, plain, tokens = (str(tmp_path / name) for name in ("prompts.jsonl", "plain.jsonl", "tokens.jsonl"))
    skeleton.prompts(ROOT / "README.md", given, f"{PAIR}/target", 9)
    skeleton.collect(given, plain)
    skeleton.collect(given, tokens, "speculate")
    skeleton.compare(tokens, f"{PAIR}/target", "1e-4")
    with pytest.raises(SystemExit, match="not the target"):
        skeleton.compare(plain, f"{PAIR}/draft")
    lines = [json.loads(line) for file in (plain, tokens) for line in Path(file).read_text().splitlines()]
    assert len({line["seed"] for line in lines}) == len(lines) == 18
    assert main(["audit", tokens, "--control", plain, "--target", f"{PAIR}/target"]) in (0, 3)


def test_the_workflow_parses_and_its_commands_exist() -> None:
    (job,) = yaml.safe_load((ROOT / "audit/docs/audit-workflow.yml").read_text())["jobs"].values()
    skeleton = script("audit/docs/any_engine.py")
    commands = [shlex.split(line) for step in job["steps"] for line in step.get("run", "").splitlines()]
    for command in commands:
        words = command[: command.index(">")] if ">" in command else command
        if words[0] == "specnb-audit":
            _parser().parse_args(words[1:])
        elif words[1] == "any_engine.py":
            inspect.signature(getattr(skeleton, words[2])).bind(*words[3:])
    assert sum(command[0] == "specnb-audit" for command in commands) == 2


@pytest.mark.parametrize("page", ["litgpt", "on-transformers"])
def test_functions_for_the_skeleton_have_what_it_calls(page: str) -> None:
    (code,) = re.findall(
        r"```python\n(def engine.*?)```", (ROOT / f"audit/docs/{page}.md").read_text(), flags=re.DOTALL
    )
    namespace: dict[str, object] = {}
    exec(compile(code, page, "exec"), namespace)  # nothing is imported before it is called
    assert re.findall(r"def (\w+)\((.*?)\)", code)[-2:] == [("logits", "prompt"), ("tokens", "prompt, seed, speculate")]


def test_the_tables_of_engines_are_those_of_the_results() -> None:
    """`python audit/docs/engines.py` writes them anew."""
    assert (ROOT / "audit/docs/engines.md").read_text(encoding="utf-8") == script("audit/docs/engines.py").page()
