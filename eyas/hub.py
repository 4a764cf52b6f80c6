"""Things on the Hugging Face hub: how the config names them, where their files lie here, and which files make a tokenizer.

    hub://ORG/NAME@REVISION                  a model: its tokenizer, never its weights
    hub://datasets/ORG/NAME@REVISION/PATH    one file of a dataset

A commit is the best REVISION. A tag or branch stays as it was when it was fetched.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from msgspec import Struct

SCHEME = "hub://"
FOLDER = "data/hub"  # relative to the working directory; ignored by git

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPO = rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>{_NAME}))?"
_MODEL = re.compile(rf"{SCHEME}{_REPO}")
_FILE = re.compile(rf"{SCHEME}datasets/{_REPO}/(?P<path>.+)")

# Whole names; `*` stops at a slash. config.json and generation_config.json say at which ids an answer ends.
_TOKENIZER = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_CODE = ("*.py",)


@dataclass(frozen=True)
class Reference:
    """A model, or one file of a dataset, at a revision."""

    kind: Literal["models", "datasets"]
    repo: str
    revision: str
    path: str = ""

    @property
    def place(self) -> Path:
        """The model's folder, or the file."""
        return Path(FOLDER, self.kind, self.repo, self.revision, self.path)

    @property
    def manifest(self) -> Path:
        """What rule `fetch` writes when all of it is here: in the model's folder, or beside the file."""
        return Path(f"{self.place}.manifest.json" if self.path else self.place / "manifest.json")


class FetchedFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it came: size in bytes."""

    name: str
    size: int
    sha256: str


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """What was fetched. Written last, so that what it names is whole. commit: what the revision was then."""

    repo: str
    revision: str
    commit: str
    files: list[FetchedFile]


def is_hub(text: str) -> bool:
    return text.startswith(SCHEME)


def model_reference(text: str) -> Reference:
    """Reads hub://ORG/NAME@REVISION. Raises ValueError with the remedy."""
    match = _MODEL.fullmatch(text)
    if match is None:
        raise ValueError(f"{text} is no model on the hub; write {SCHEME}ORG/NAME@REVISION")
    return _reference("models", text, match, "")


def file_reference(text: str) -> Reference:
    """Reads hub://datasets/ORG/NAME@REVISION/PATH. Raises ValueError with the remedy."""
    match = _FILE.fullmatch(text)
    if match is None or any(part in ("", ".", "..") for part in match["path"].split("/")):
        raise ValueError(f"{text} is no file on the hub; write {SCHEME}datasets/ORG/NAME@REVISION/PATH")
    return _reference("datasets", text, match, match["path"])


def _reference(kind: Literal["models", "datasets"], text: str, match: re.Match[str], path: str) -> Reference:
    if match["revision"] is None:
        raise ValueError(
            f"{text} names no revision; pin one, best a commit, as in {SCHEME}{'datasets/' * (kind == 'datasets')}"
            f"{match['repo']}@REVISION"
        )
    return Reference(kind, match["repo"], match["revision"], path)


def reference(text: str) -> Reference:
    """Reads either. Raises ValueError with the remedy."""
    return file_reference(text) if text.startswith(f"{SCHEME}datasets/") else model_reference(text)


def tokenizer_folder(text: str) -> Path:
    """Where the files of `model.tokenizer` lie."""
    return model_reference(text).place if is_hub(text) else Path(text)


def tokenizer_files(names: Iterable[str], *, code: bool) -> list[str]:
    """Those of `names`, relative to a model's folder, that make its tokenizer; with `code`, Python files too."""
    patterns = _TOKENIZER + _CODE * code
    return sorted(name for name in names if any(_fits(name, pattern) for pattern in patterns))


def _fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def files_in(folder: Path, *, code: bool) -> list[str]:
    """The tokenizer's files in a folder."""
    found = [path for path in [*folder.glob("*"), *folder.glob("*/*.jinja")] if path.is_file()]
    return tokenizer_files((path.relative_to(folder).as_posix() for path in found), code=code)


def files_digest(folder: Path, *, code: bool) -> str:
    """One digest over names and bytes of the tokenizer's files, 32 hex digits; the same wherever the folder lies."""
    total = hashlib.sha256()
    for name in files_in(folder, code=code):
        with (folder / name).open("rb") as file:
            total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()[:32]
