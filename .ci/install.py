"""Makes `.venv` with all packages unless it is there, whole and up to date; `make` calls it before
everything else.

Uses nothing but the standard library. The mark `.venv/ready` is written last and says what the
environment was made from, so an installation that was interrupted, other requirements, another
Python or a moved folder are noticed.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
READY = VENV / "ready"
REQUIREMENTS = ("requirements.txt", "constraints.txt", "pyproject.toml", "audit/pyproject.toml")
OLDEST = (3, 11)
SETTINGS = {
    # Kernels here talk to this machine only and are interrupted when their notebook ends; they need
    # not report it.
    "etc/ipython/ipython_kernel_config.py": "c.IPKernelApp.log_level = 50\n",
    # JupyterLab does not ask, over the first notebook, whether it may fetch news.
    "share/jupyter/lab/settings/overrides.json": (
        '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}\n'
    ),
}
VERSION = "import sys; print(sys.version_info[:2], sys.prefix)"


def wanted() -> dict[str, str]:
    """What the mark says of an environment that needs nothing."""
    content = b"\0".join((ROOT / name).read_bytes() for name in REQUIREMENTS)
    return {"python": python(), "requirements": hashlib.sha256(content).hexdigest()}


def python() -> str:
    """Version and place of the environment's Python; empty where it does not start."""
    try:
        return subprocess.run([VENV / "bin" / "python", "-c", VERSION], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def marked() -> dict[str, str]:
    """What the mark says; empty if there is none or it cannot be read."""
    try:
        found = json.loads(READY.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def install(lock: int) -> None:
    """Makes the environment. `lock` is the file that is locked: pip keeps it open, so that it is
    locked for as long as pip writes, also after this process was killed and pip was not.
    """
    before = marked()
    READY.unlink(missing_ok=True)
    if not before or before.get("python") != python():
        if VENV.exists():
            shutil.rmtree(VENV)
        # The Python below a virtual environment, which may be the very one that has just been
        # deleted.
        base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        subprocess.run([base if base.exists() else sys.executable, "-m", "venv", VENV], check=True, pass_fds=[lock])
    pip = [VENV / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", "requirements.txt"], cwd=ROOT, check=True, pass_fds=[lock])
    for name, content in SETTINGS.items():
        (VENV / name).parent.mkdir(parents=True, exist_ok=True)
        (VENV / name).write_text(content)
    READY.write_text(json.dumps(wanted(), indent=1) + "\n")


def main() -> None:
    if marked() == wanted():
        return
    if sys.version_info < OLDEST:
        raise SystemExit(
            f"{sys.executable} is Python {sys.version.split()[0]}; 3.11 or later is needed: make PYTHON=..."
        )
    try:
        (ROOT / "build").mkdir(exist_ok=True)
        with (ROOT / "build" / "install.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("another installation is at work in this folder; waiting for it to end", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if marked() != wanted():
                print("installing packages into .venv", flush=True)
                install(lock.fileno())
    except OSError as error:
        raise SystemExit(f"cannot install into {VENV}: {error}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"cannot install into {VENV}: a command ended with status {error.returncode}") from None


if __name__ == "__main__":
    main()
