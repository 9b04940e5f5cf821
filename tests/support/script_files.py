"""Scripts of the checkout that belong to no package: imported from their files, or asked by node."""

import json
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NODE = shutil.which("node")
NEEDS_NODE = pytest.mark.skipif(NODE is None, reason="there is no node, which runs the arithmetic of the figures here")


def script(path: str) -> ModuleType:
    """The file at `path` as a module of its own, new at each call."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def computed(expression: str, cases: list[Any]) -> Any:
    """The value of `expression`, a function of the parts of a case in `widgets.js`, for each of them."""
    module = (ROOT / "notebooks/support/widgets.js").read_text(encoding="utf-8")
    code = f"{module}\nconsole.log(JSON.stringify({json.dumps(cases)}.map({expression})));"
    done = subprocess.run([str(NODE), "--input-type=module"], input=code, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
