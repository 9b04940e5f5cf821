"""Build both wheels, into build/wheels, and use them as a stranger would: in an environment of its own,
in a folder outside the checkout.

    .venv/bin/python .ci/wheel.py

The environment holds a wheel, what the wheel says it depends on (taken from the environment that
runs this, so that nothing is downloaded), and pytest. A dependency that is not declared is
therefore missing there. The sampler's wheel comes first, alone. Exit status 0 if it generates with
the pair that it ships; and if the audit's wheel, added to it, audits a file, and serves in a test.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("pytest",)

GENERATE = """
import json, sys, specnb
assert "site-packages" in specnb.__file__, specnb.__file__
pair = specnb.load_pair()
prompts = [pair.encode(text) for text in ("def area(", "import ", "class ", "for i in range(")] * 4
for name, temperature in (("exact", 1.0), ("greedy", 0.0)):
    sampling = specnb.Sampling(temperature)
    made = specnb.generate(pair.target, prompts, pair.draft, gamma=4, max_new_tokens=32, sampling=sampling, seed=1)
    lines = [json.dumps({"prompt": p, "tokens": list(t)}) for p, t in zip(prompts, made.tokens)]
    open(f"{name}.jsonl", "w").write("\\n".join(lines))
"""

TEST = """
import pytest, torch
import specnb_audit

PROBS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

def target(context):
    return PROBS

def sampled(probs):
    return torch.multinomial(probs, 800, replacement=True, generator=torch.Generator().manual_seed(1)).view(100, 8)

def test_an_exact_sampler_passes():
    specnb_audit.assert_exact(target, sampled(PROBS).tolist(), prompts=[[0]] * 100)

def test_another_distribution_is_rejected():
    with pytest.raises(AssertionError):
        specnb_audit.assert_exact(target, sampled(PROBS.flip(0)).tolist(), prompts=[[0]] * 100)
"""

PREDICT = ("--alpha", "0.8", "--gamma", "4", "--cost-ratio", "0.05", "--verify-cost", "1")


def requirements(name: str, wheel: Path) -> list[str]:
    """The names of all distributions that the wheel needs without its extras, those they need
    included."""
    (own,) = metadata.Distribution.discover(name=name, path=[str(wheel)])
    waiting, needed = [*(own.requires or []), *TOOLS], set()
    while waiting:
        name, _, marker = waiting.pop().partition(";")
        name = re.match(r"[\w.-]+", name)[0].lower().replace("_", "-")
        if name in needed or name == "specnb" or "extra ==" in marker:
            continue
        try:
            waiting += metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            if not marker:  # otherwise it is for another platform
                raise
            continue
        needed.add(name)
    return sorted(needed)


def link(names: list[str], site: Path) -> None:
    """Links to the files of the distributions `names` in the folder `site`."""
    for name in names:
        distribution = metadata.distribution(name)
        for top in {Path(str(file)).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(top))).resolve()
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        env, work = (Path(folder) / name for name in ("env", "work"))
        work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
        python = env / "bin" / "python"

        def install(name: str, project: Path) -> Path:
            # The source distribution first, and the wheel from it: what either leaves out is
            # missing in the tests.
            subprocess.run([sys.executable, "-m", "build", "--no-isolation", "-o", Path(folder) / name, project],
                           check=True, stdout=subprocess.DEVNULL)  # fmt: skip
            (wheel,) = (Path(folder) / name).glob("*.whl")
            subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps",
                            "--no-index", wheel], check=True)  # fmt: skip
            link(requirements(name, wheel), Path(sysconfig.get_path("purelib", vars={"base": str(env)})))
            return wheel

        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPECNB"))}
        clean |= {"HF_HUB_OFFLINE": "1", "PATH": f"{env / 'bin'}:{os.environ['PATH']}"}

        def run(*command: str | Path, status: int = 0) -> None:
            done = subprocess.run(command, cwd=work, env=clean, capture_output=True, text=True)
            if done.returncode != status:
                sys.exit(f"{command} ended with status {done.returncode}, not {status}\n{done.stdout}{done.stderr}")

        wheels = [install("specnb", ROOT)]
        run(python, "-c", GENERATE)
        wheels.append(install("specnb-audit", ROOT / "audit"))
        run("specnb-audit", "predict", *PREDICT)
        (pair,) = (env / "lib").glob("python*/site-packages/specnb/_pair")
        settings = ("--target", pair / "target", "--draft", pair / "draft", "--max-new-tokens", "32")
        run("specnb-audit", "audit", "exact.jsonl", *settings)
        run("specnb-audit", "audit", "greedy.jsonl", *settings, status=1)
        (work / "test_sampler.py").write_text(TEST)
        run(python, "-m", "pytest", "-q", "test_sampler.py")
        kept = ROOT / "build" / "wheels"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for wheel in wheels:
            shutil.copy(wheel, kept)
        named = " and ".join(f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB)" for wheel in wheels)
        print(f"{named}: installed, imported and used outside the checkout; in build/wheels")


if __name__ == "__main__":
    main()
