"""The environment's installer: it does nothing twice, and never takes an interrupted installation
for a whole one."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from script_files import ROOT, script


class Commands:
    """Stands for `subprocess.run`: makes a folder in place of a virtual environment, and installs
    nothing."""

    def __init__(self, root: Path) -> None:
        self.root, self.version = root, "(3, 11) here"
        self.made: list[str] = []
        self.error: BaseException | None = None

    def __call__(self, command: Sequence[Any], pass_fds: Sequence[int] = (), **_: Any) -> SimpleNamespace:
        words = [str(word) for word in command]
        if "venv" in words:
            self.made.append("venv")
            (self.root / ".venv" / "bin").mkdir(parents=True)
        elif "pip" in words:
            self.made.append("pip")
            self.has_lock(pass_fds)
            if self.error is not None:
                raise self.error
        elif not (self.root / ".venv").exists():
            raise FileNotFoundError(words[0])
        return SimpleNamespace(stdout=self.version)

    def has_lock(self, handed: Sequence[int]) -> None:
        """The lock is handed on to pip, so that it holds while pip writes, also after the installer
        was killed."""
        file = self.root / "build" / "install.lock"
        assert [os.fstat(one).st_ino for one in handed] == [file.stat().st_ino]
        with file.open("a") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The installer of an empty project, whose commands are counted and not executed."""
    module = script(".ci/install.py")
    for name, value in {"ROOT": tmp_path, "VENV": tmp_path / ".venv", "READY": tmp_path / ".venv" / "ready"}.items():
        monkeypatch.setattr(module, name, value)
    for name in module.REQUIREMENTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(module.subprocess, "run", Commands(tmp_path))
    return module


def commands(installer: ModuleType) -> list[str]:
    """What a run of the installer executes."""
    installer.subprocess.run.made.clear()
    installer.main()
    return list(installer.subprocess.run.made)


CHANGES: dict[str, tuple[Callable[[ModuleType], object], list[str]]] = {
    "nothing": (lambda _: None, []),
    "other requirements": (lambda installer: (installer.ROOT / "constraints.txt").write_text("torch==1\n"), ["pip"]),
    "another Python": (lambda installer: setattr(installer.subprocess.run, "version", "(3, 13)"), ["venv", "pip"]),
    "no mark": (lambda installer: installer.READY.unlink(), ["venv", "pip"]),
} | {
    f"the mark {text!r}": (lambda installer, text=text: installer.READY.write_text(text), ["venv", "pip"])
    for text in ("", "{", "[]", "{}")
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_made_anew_and_nothing_twice(installer: ModuleType, change: str) -> None:
    assert commands(installer) == ["venv", "pip"]
    (installer.VENV / "old").touch()
    edit, wanted = CHANGES[change]
    edit(installer)
    assert commands(installer) == wanted
    assert (installer.VENV / "old").exists() == ("venv" not in wanted)
    assert commands(installer) == []


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), "^$"),
        (SystemExit(143), "143"),
        (subprocess.CalledProcessError(1, "pip"), "cannot install .* 1"),
    ],
)
def test_what_was_interrupted_or_failed_begins_anew(installer: ModuleType, error: BaseException, raised: str) -> None:
    """As after a kill: whatever lies in the folder then, there is no mark."""
    installer.subprocess.run.error = error
    with pytest.raises((KeyboardInterrupt, SystemExit), match=raised):
        installer.main()
    installer.subprocess.run.error = None
    assert commands(installer) == ["venv", "pip"]


def test_an_old_python_is_refused(installer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer, "OLDEST", (99,))
    with pytest.raises(SystemExit, match=r"later is needed: make PYTHON="):
        installer.main()
    assert installer.subprocess.run.made == []


EDITABLE = "from setuptools.build_meta import build_editable; print(build_editable('wheel'))"
IMPORT = (
    "import site; site.addsitedir('site'); import specnb, specnb_audit; print(specnb.__file__, specnb_audit.__file__)"
)


def test_editable_installs_are_imported_from_the_folder_above(tmp_path: Path) -> None:
    """Git clones into a folder called `specnb`; seen from above, that folder is a package without
    content."""
    checkout = tmp_path / "specnb"
    for name in ("pyproject.toml", "LICENSE", "docs/package.md", "specnb_cli.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for folder in ("specnb", "audit", "data/pair", "data/smollm2-head"):
        ignored = shutil.ignore_patterns("*.safetensors", "*.json", "*.egg-info")
        shutil.copytree(ROOT / folder, checkout / folder, ignore=ignored)
    (checkout / "specnb/__init__.py").write_text("")  # imports nothing, so the test is fast
    for project in (checkout, checkout / "audit"):
        made = subprocess.run([sys.executable, "-c", EDITABLE], cwd=project, check=True, capture_output=True, text=True)
        with ZipFile(project / "wheel" / made.stdout.split()[-1]) as wheel:
            wheel.extractall(tmp_path / "site")
    found = subprocess.run([sys.executable, "-ESc", IMPORT], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.stdout.split() == [f"{checkout}/specnb/__init__.py", f"{checkout}/audit/specnb_audit/__init__.py"]
