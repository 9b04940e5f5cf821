"""What pip installs of this project."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from script_files import ROOT

WITHOUT_ONEDNN = """
import torch
torch.backends.mkldnn.is_available = lambda: False
torch.ops.mkldnn = None
import specnb
print(len(specnb.Sampler(specnb.load_pair()).generate("a", max_new_tokens=2).tokens[0]))
"""


def test_an_environment_is_made_whatever_the_path_and_the_locale(tmp_path: Path) -> None:
    """Git clones into a folder called `specnb`; seen from above, that folder is a package without
    content. Containers and cron often have LC_ALL=C. Nothing is downloaded: setuptools is that of
    this environment, and there are no dependencies."""
    checkout = tmp_path / "Prüfung" / "specnb"
    files = ("Makefile", "LICENSE", "constraints.txt", "docs/package.md", "audit/LICENSE", "audit/README.md")
    for name in (*files, "pyproject.toml", "requirements.txt", "audit/pyproject.toml"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for folder in (".ci", "specnb", "audit/specnb_audit", "data/pair"):
        ignored = shutil.ignore_patterns("*.safetensors", "*.json", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT / folder, checkout / folder, ignore=ignored)
    (checkout / "specnb/__init__.py").write_text("")  # imports nothing, so the test is fast
    alone = {"LC_ALL": "C", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    pip = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    pip["PYTHONPATH"] = os.pathsep.join(sys.path)
    make = ["make", f"PYTHON={sys.executable}", "environment"]
    done = subprocess.run(make, cwd=checkout, env=alone | pip, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    command = [str(checkout / ".venv/bin/python"), "-c", "import specnb; print(ascii(specnb.__file__))"]
    found = subprocess.run(command, cwd=checkout.parent, env=alone, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [ascii(f"{checkout}/specnb/__init__.py")]


def test_a_torch_without_onednn_decodes() -> None:
    """As it is built for macOS on arm64."""
    made = subprocess.run([sys.executable, "-c", WITHOUT_ONEDNN], check=True, capture_output=True, text=True)
    assert made.stdout == "2\n"
