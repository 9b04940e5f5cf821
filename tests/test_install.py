"""The environment's installer: it does nothing twice, and never takes an interrupted installation for a whole one."""

from __future__ import annotations

import fcntl
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

INSTALLER = Path(__file__).parent.parent / ".ci" / "install.py"


class Commands:
    """Stands for `subprocess.run`: makes a folder in place of a virtual environment, and installs nothing."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.version = "(3, 11) here"
        self.made: list[str] = []
        self.error: BaseException | None = None

    def __call__(self, command: Sequence[Any], **settings: Any) -> SimpleNamespace:
        words = [str(word) for word in command]
        if "venv" in words:
            self.made.append("venv")
            (self.venv / "bin").mkdir(parents=True)
        elif "pip" in words:
            self.made.append("pip")
            if self.error is not None:
                raise self.error
        elif not self.venv.exists():
            raise FileNotFoundError(words[0])
        return SimpleNamespace(stdout=self.version)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The installer of an empty project, whose commands are counted and not executed."""
    spec = importlib.util.spec_from_file_location("install", INSTALLER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    for name, value in {"ROOT": tmp_path, "VENV": venv, "READY": venv / "ready"}.items():
        monkeypatch.setattr(module, name, value)
    for name in module.REQUIREMENTS:
        (tmp_path / name).touch()
    monkeypatch.setattr(module.subprocess, "run", Commands(venv))
    return module


def commands(installer: ModuleType) -> list[str]:
    """What a run of the installer executes."""
    installer.subprocess.run.made.clear()
    installer.main()
    return list(installer.subprocess.run.made)


def test_a_whole_environment_is_left_alone(installer: ModuleType) -> None:
    assert commands(installer) == ["venv", "pip"]
    assert commands(installer) == []


def test_other_requirements_are_installed_into_the_same_environment(installer: ModuleType, tmp_path: Path) -> None:
    commands(installer)
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    assert commands(installer) == ["pip"]
    assert commands(installer) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_installation_begins_anew(installer: ModuleType, error: BaseException) -> None:
    """As after a kill: whatever lies in the folder then, there is no mark."""
    installer.subprocess.run.error = error
    with pytest.raises(type(error)):
        installer.main()
    installer.subprocess.run.error = None
    assert commands(installer) == ["venv", "pip"]


WITHOUT_PACKAGES = """
import importlib.util, subprocess, sys
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import SimpleNamespace

spec = importlib.util.spec_from_file_location("install", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.ROOT = Path(sys.argv[2])
module.VENV = module.ROOT / ".venv"
module.READY = module.VENV / "ready"
run, waiting = subprocess.run, [sys.executable, "-c", "print('pip is at work', flush=True); input()"]
module.subprocess.run = lambda command, **settings: (
    run(waiting, pass_fds=settings["pass_fds"]) if "pip" in command else SimpleNamespace(stdout="")
)
module.main()
"""


def test_the_pip_of_a_killed_installer_is_waited_for(tmp_path: Path) -> None:
    """After kill -9 of the installer alone, pip goes on writing into the environment."""
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    command = [sys.executable, "-c", WITHOUT_PACKAGES, str(INSTALLER), str(tmp_path)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        while "pip is at work" not in (line := started.stdout.readline()):
            assert line, "the installer ended before pip was started"
        started.kill()
        started.wait()
        with (tmp_path / "build" / "install.lock").open("a") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            started.stdin.close()  # which ends pip
            started.stdout.read()
            fcntl.flock(lock, fcntl.LOCK_EX)


def test_a_failed_installation_says_so_and_begins_anew(installer: ModuleType) -> None:
    commands(installer)
    installer.READY.unlink()
    installer.subprocess.run.error = subprocess.CalledProcessError(1, "pip")
    with pytest.raises(SystemExit, match=r"cannot install into .*status 1"):
        installer.main()
    assert not installer.READY.exists()


def test_another_python_makes_a_new_environment(installer: ModuleType, tmp_path: Path) -> None:
    """After an upgrade, or in a folder that was moved, nothing of the old environment is kept."""
    commands(installer)
    (tmp_path / ".venv" / "old").touch()
    installer.subprocess.run.version = "(3, 13) here"
    assert commands(installer) == ["venv", "pip"]
    assert not (tmp_path / ".venv" / "old").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_mark_is_no_mark(installer: ModuleType, content: str) -> None:
    commands(installer)
    installer.READY.write_text(content)
    assert commands(installer) == ["venv", "pip"]


def test_an_old_python_is_refused(installer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer, "OLDEST", (99,))
    with pytest.raises(SystemExit, match=r"later is needed: make PYTHON="):
        installer.main()
    assert installer.subprocess.run.made == []
