"""What pip installs of this project."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from script_files import ROOT

EDITABLE = "from setuptools.build_meta import build_editable; print(build_editable('wheel'))"
IMPORT = "import site; site.addsitedir('site'); import specnb; print(specnb.__file__)"

WITHOUT_ONEDNN = """
import torch
torch.backends.mkldnn.is_available = lambda: False
torch.ops.mkldnn = None
import specnb
print(len(specnb.Sampler(specnb.load_pair()).generate("a", max_new_tokens=2).tokens[0]))
"""


def test_an_editable_install_is_imported_from_the_folder_above(tmp_path: Path) -> None:
    """Git clones into a folder called `specnb`; seen from above, that folder is a package without
    content."""
    checkout = tmp_path / "specnb"
    for name in ("pyproject.toml", "LICENSE", "docs/package.md"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for folder in ("specnb", "data/pair"):
        ignored = shutil.ignore_patterns("*.safetensors", "*.json", "*.egg-info")
        shutil.copytree(ROOT / folder, checkout / folder, ignore=ignored)
    (checkout / "specnb/__init__.py").write_text("")  # imports nothing, so the test is fast
    made = subprocess.run([sys.executable, "-c", EDITABLE], cwd=checkout, check=True, capture_output=True, text=True)
    with ZipFile(checkout / "wheel" / made.stdout.split()[-1]) as wheel:
        wheel.extractall(tmp_path / "site")
    found = subprocess.run([sys.executable, "-ESc", IMPORT], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [f"{checkout}/specnb/__init__.py"]


def test_a_torch_without_onednn_decodes() -> None:
    """As it is built for macOS on arm64."""
    made = subprocess.run([sys.executable, "-c", WITHOUT_ONEDNN], check=True, capture_output=True, text=True)
    assert made.stdout == "2\n"
