"""A tokenizer that a model brings as Python code, run by transformers because the config trusts it."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eyas.chat_template import date_text
from eyas.errors import EyasError
from eyas.pieces import byte_level
from eyas.tokenizer import Added

# 5.x splits Kimi's <think> into ordinary tokens, so that a whole answer looks like reasoning.
FIRST, BEFORE = (4, 57, 1), (5,)


class Remote:
    """The tokenizer that transformers makes of a folder with `trust_remote_code` (tokenizer.Backend)."""

    def __init__(self, folder: Path, trusted: bool) -> None:
        """Raises EyasError if the code is not trusted, or something that it needs is not installed."""
        if not trusted:
            files = ", ".join(sorted(path.name for path in folder.glob("*.py"))) or "none there"
            raise EyasError(
                f"model.trust_remote_code: {folder} has its tokenizer as Python code ({files}); read it, and set true to run it"
            )
        _check_version(folder)
        self._tokenizer = _from_folder(folder)
        self.added = self._added()
        size = max(len(self._tokenizer), *(token.id + 1 for token in self.added))
        self.pieces = [_bytes(token) for token in self._tokenizer.convert_ids_to_tokens(list(range(size)))]
        for token in self.added:
            self.pieces[token.id] = token.content.encode()
        named = self._tokenizer.special_tokens_map
        self.special_tokens: dict[str, str | None] = {k: v for k, v in named.items() if isinstance(v, str)}
        try:
            self.template: str = self._tokenizer.get_chat_template()
        except ValueError:  # it has none
            self.template = ""
        # Kimi's own encode reads what spells a control token as text only if told so by this argument.
        self._by_itself = "allow_special_tokens" in inspect.signature(self._tokenizer.encode).parameters

    def _added(self) -> list[Added]:
        added = {
            token: Added(token, text.content, text.special)
            for token, text in self._tokenizer.added_tokens_decoder.items()
        }
        # tiktoken has special tokens that transformers may not know of, such as reserved ones.
        encoding: Any = getattr(self._tokenizer, "model", None)
        for text in getattr(encoding, "special_tokens_set", ()):
            token = encoding.encode_single_token(text)
            added.setdefault(token, Added(token, text, True))
        return list(added.values())

    def encode(self, text: str, *, control: bool) -> list[int]:
        if self._by_itself:
            return list(self._tokenizer.encode(text, allow_special_tokens=control))
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not control))

    def speed_up(self) -> None:
        """It is as fast as it gets: over tiktoken, as a rule."""

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """Through the tokenizer's own method, which may write the tools in a form that the template alone cannot."""
        given = {"add_generation_prompt": True, **options, "strftime_now": date_text(options)}
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, **given
        )
        return text


def _check_version(folder: Path) -> None:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if not FIRST <= numbers < BEFORE:
        raise EyasError(
            f"model.tokenizer: {folder} has its tokenizer as Python code, which needs transformers from 4.57.1 to below 5 "
            f"(here: {version}); run: pip install 'eyas[remote-code]'"
        )


def _from_folder(folder: Path) -> Any:
    load = _loader()
    try:
        # tiktoken keeps tables under the path that they were read from, and would give an old one for a new one there.
        with contextlib.redirect_stdout(sys.stderr), _environment(TIKTOKEN_CACHE_DIR=""):
            return load(str(folder), trust_remote_code=True, local_files_only=True)
    except Exception as error:
        what = " ".join(str(error).split())[:300]
        raise EyasError(
            f"model.tokenizer: the code in {folder} fails ({type(error).__name__}: {what}); install what it needs "
            f"(pip install 'eyas[remote-code]'), or fetch its files again"
        ) from error


@cache
def _loader() -> Any:
    """transformers' AutoTokenizer.from_pretrained."""
    # It copies a model's code before it runs it: to a place of our own, so that two jobs do not meet in one. And it would
    # tell that it finds no torch, which no tokenizer needs. Both are read once, when it is imported.
    copies = tempfile.mkdtemp(prefix="eyas-remote-code-")
    atexit.register(shutil.rmtree, copies, ignore_errors=True)
    with _environment(HF_MODULES_CACHE=copies, TRANSFORMERS_NO_ADVISORY_WARNINGS="1"):
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets variables for a while: a server that is started later must not inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _bytes(token: str | bytes | None) -> bytes:
    if token is None:
        return b""
    return token if isinstance(token, bytes) else byte_level(token)
