"""The tokenizer of a Hugging Face model folder: text ↔ ids, control tokens apart from text that only spells them.

`tokenizer.json` is read by the `tokenizers` library alone. A model that brings its tokenizer as Python code (Kimi's, over
tiktoken) is loaded by transformers, only if the config trusts it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from eyas.chat_template import FAILURES, ChatTemplate
from eyas.config import ModelConfig
from eyas.errors import EyasError
from eyas.hub import is_hub, model_reference, tokenizer_folder
from eyas.pieces import Pieces, byte_level
from eyas.plugins import Reject

if TYPE_CHECKING:
    from eyas.lengths import Array
    from eyas.ranked import Ranked

# Includes what tokenizers lose when they are loaded wrongly: leading spaces, runs of white space, bytes of an emoji.
AWKWARD_TEXT = "Ünïcödé 漢字 😀👩‍👩‍👧 \t\x00 <b>\r\n\n\n  x = 1;\u2028 the end "

# Markers of reasoning, tool calls and channels: tokens of their own, but a part of the answer and no control of the turns.
_ANSWER = re.compile(
    r"think|thought|reason|call|func|invoke|param|arg_|tool.sep|channel|message|constrain|DSML|<\|(start|end)\|>",
    re.IGNORECASE,
)
_CONTROL_SPELLING = re.compile(r"<[|｜].*[|｜]>")


class Added(Struct, frozen=True):
    """A token that is more than ordinary text."""

    id: int
    content: str
    special: bool


class Backend(Protocol):
    """A tokenizer as its own library has it. pieces: bytes of each id. added: all added tokens."""

    pieces: list[bytes]
    added: list[Added]
    special_tokens: dict[str, str | None]
    template: str

    def encode(self, text: str, *, control: bool) -> list[int]: ...

    def speed_up(self) -> None: ...

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str: ...


class HubTokenizer:
    """Text ↔ ids of one model (plugins.Tokenizer).

    control_ids: control tokens, which no answer holds inside. added_tokens: id by text of each token that is more than
    text: control tokens, markers of reasoning and tool calls. structural_ids: the same as ids; white space is neither.
    """

    asks_server = False

    def __init__(self, folder: Path, backend: Backend) -> None:
        self._folder, self._backend = folder, backend
        added = [token for token in backend.added if token.content.strip(" \t\r\n▁")]
        self.template = backend.template
        self.special_tokens = {
            name: text for name, text in backend.special_tokens.items() if text is not None
        }
        self.added_tokens = {token.content: token.id for token in added}
        self.structural_ids = frozenset(token.id for token in added)
        self.vocabulary_size = len(backend.pieces)
        self.stop_ids = sorted(self._stop_ids())
        control = {token.id for token in added if self._is_control(token)}
        self.control_ids = sorted(control.union(self.stop_ids))
        # Servers pad the vocabulary, and a model may choose an id that has no text.
        padding = max(0, _vocabulary_size(_json(folder / "config.json")) - self.vocabulary_size)
        self._pieces = Pieces([*backend.pieces, *[b""] * padding], self.stop_ids)

    def encode(self, text: str, *, control: bool) -> list[int]:
        """Ids of `text`. With `control`, spelt added tokens become those tokens; without, ordinary text.

        Raises Reject for text with lone surrogates.
        """
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Reject("text is not valid Unicode") from None
        return self._backend.encode(text, control=control)

    def speed_up(self) -> None:
        """Takes 0.7 s so that many prompts are encoded sooner, with the same ids."""
        self._backend.speed_up()

    def decode(self, ids: Sequence[int] | Array) -> tuple[str, str]:
        """As in Pieces.decode. Raises EyasError for an id that the model does not have."""
        try:
            return self._pieces.decode(ids)
        except IndexError:
            raise EyasError(
                f"model.tokenizer: {self._folder} has ids below {len(self._pieces):,}, the server gave {max(ids):,} or a "
                f"negative one; serve the model that the tokenizer belongs to"
            ) from None

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """As in ChatTemplate.apply."""
        if not self.template:
            raise EyasError(
                f"model.tokenizer: {self._folder} has no chat template; put the model's into {self._folder}/chat_template.jinja"
            )
        return self._backend.apply(messages, tools, options)

    def self_test(self) -> None:
        """Raises EyasError unless known texts become the right ids, and ids the right texts."""
        ids = self.encode(AWKWARD_TEXT, control=False)
        text = self.decode(ids)[0]
        if text != AWKWARD_TEXT:
            raise EyasError(
                f"model.tokenizer: {self._folder} turns {AWKWARD_TEXT!r} into {text!r}; Eyas needs a tokenizer that keeps "
                f"every text (byte-level BPE, tiktoken, or byte fallback without an added space)"
            )
        for text, token in self.added_tokens.items():
            if token not in self.control_ids and text not in self.template:
                continue
            as_token, as_text = self.encode(text, control=True), self.encode(text, control=False)
            if as_token != [token] or not self.structural_ids.isdisjoint(as_text):
                raise EyasError(
                    f"model.tokenizer: {self._folder} has {text!r} as id {token}, but encodes it as {as_token}, and as {as_text} "
                    f"where it is ordinary text; fetch its files again, or use the version of transformers that they are for"
                )

    def _is_control(self, token: Added) -> bool:
        if _ANSWER.search(token.content):
            return False
        return (
            token.special
            or token.content in self.template
            or bool(_CONTROL_SPELLING.fullmatch(token.content))
        )

    def _stop_ids(self) -> set[int]:
        """Where an answer ends: as the model's configs say, and as its template ends an assistant's turn."""
        config = _json(self._folder / "config.json")
        configs = [_json(self._folder / "generation_config.json"), config, config.get("text_config") or {}]
        stops: set[int] = set()
        for section in configs:
            ids = section.get("eos_token_id")
            stops |= set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
        stops |= set(self.encode(self.special_tokens.get("eos_token", ""), control=True)[-1:])
        return stops | self._turn_end()

    def _turn_end(self) -> set[int]:
        talk = [{"role": "user", "content": "\ue000"}, {"role": "assistant", "content": "\ue001"}]
        options = {"add_generation_prompt": False, "strftime_now": ""}
        try:
            text = self.apply_template(talk, [], options)
        except (*FAILURES, EyasError):
            return set()
        _, mark, tail = text.rpartition("\ue001")
        ids = self.encode(tail, control=True) if mark else []
        ended = ids[:1] if not tail[len(self._text(ids[:1])) :].strip() else []
        return set(ended) & self.structural_ids

    def _text(self, ids: Sequence[int]) -> str:
        return b"".join(self._backend.pieces[token] for token in ids).decode(errors="replace")


def load_tokenizer(model: ModelConfig) -> HubTokenizer:
    """The tokenizer of `model.tokenizer`, self-tested. Raises EyasError, one line that names file and remedy."""
    if model.tokenizer is None:
        raise EyasError(
            "model.tokenizer: this engine needs the model's tokenizer; name its folder, or write hub://ORG/NAME@REVISION"
        )
    folder = tokenizer_folder(model.tokenizer)
    if is_hub(model.tokenizer) and not model_reference(model.tokenizer).manifest.is_file():
        raise EyasError(f"model.tokenizer: {folder} has not been fetched; run: snakemake --cores 1 fetch")
    return _load(folder, model.trust_remote_code)


@lru_cache(maxsize=2)
def _load(folder: Path, trusted: bool) -> HubTokenizer:
    code = (_json(folder / "tokenizer_config.json").get("auto_map") or {}).get("AutoTokenizer")
    if code or not (folder / "tokenizer.json").is_file():
        from eyas.remote_tokenizer import Remote

        tokenizer = HubTokenizer(folder, Remote(folder, trusted))
    else:
        tokenizer = HubTokenizer(folder, _Fast(folder))
    tokenizer.self_test()
    return tokenizer


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty for a file that is not there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise EyasError(f"model.tokenizer: {path} is damaged ({error}); fetch it again") from None


def _vocabulary_size(config: Mapping[str, Any]) -> int:
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else 0


# --- tokenizer.json ----------------------------------------------------------------------------------------------


class _File(Struct):
    """What is read of tokenizer.json besides what the library reads."""

    decoder: dict[str, Any] | None
    added_tokens: list[Added]


class _Fast:
    """tokenizer.json through the `tokenizers` library."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._path = path = folder / "tokenizer.json"
        raw = path.read_bytes()
        try:
            file = msgspec.json.decode(raw, type=_File)
            self._whole = Tokenizer.from_buffer(raw)
        except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
            raise EyasError(f"model.tokenizer: {path} is no tokenizer ({error}); fetch it again") from None
        self._whole.no_truncation()
        self._whole.no_padding()
        self.added = file.added_tokens
        self._plain = Tokenizer(self._whole.model)
        self._plain.normalizer, self._plain.pre_tokenizer = self._whole.normalizer, self._whole.pre_tokenizer
        blank = [token for token in self.added if not token.content.strip(" \t\r\n▁")]
        self._plain.add_tokens(
            [
                AddedToken(token.content, normalized=False)
                for token in blank
                if self._whole.model.token_to_id(token.content) == token.id
            ]
        )
        self.pieces = _pieces(self._whole.get_vocab(with_added_tokens=False), self.added, file.decoder, path)
        config = _json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(folder, config)
        texts = _templates(folder, config)
        self.template = texts.get("default", "")
        self._templates = {name: ChatTemplate(text, self.special_tokens) for name, text in texts.items()}
        self._ranked: Ranked | None = None

    def speed_up(self) -> None:
        from eyas.ranked import ranked

        samples = [AWKWARD_TEXT, self.template, AWKWARD_TEXT.join(token.content for token in self.added)]
        self._ranked = self._ranked or ranked(self._path.read_bytes(), self._whole, self.pieces, samples)

    def encode(self, text: str, *, control: bool) -> list[int]:
        if self._ranked is not None and control and len(text) <= self._ranked.longest:
            return self._ranked.encode(text)
        tokenizer = self._whole if control else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        return self._templates[name].apply(messages, tools, options)


_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str | None]:
    """Text of each special token by name; None for one that the folder says nothing of."""
    named = {**_json(folder / "special_tokens_map.json"), **config}
    extra = config.get("extra_special_tokens")
    values = {name: named.get(name) for name in _NAMED} | (extra if isinstance(extra, dict) else {})
    return {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files go before what tokenizer_config.json says."""
    told = config.get("chat_template") or {}
    if isinstance(told, list):
        told = {entry["name"]: entry["template"] for entry in told}
    templates: dict[str, str] = {"default": told} if isinstance(told, str) else dict(told)
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    # Files replace the config's templates as a whole, as in transformers.
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()} or templates


# What a decoder is made of if a token's text is its own, "▁" a space and "<0x0A>" a byte.
_SPACED = {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _pieces(
    vocabulary: Mapping[str, int], added: Sequence[Added], decoder: Mapping[str, Any] | None, path: Path
) -> list[bytes]:
    """The bytes of every id; empty for one that is not there."""
    kinds = set(_kinds(decoder))
    if "ByteLevel" in kinds:
        spell = byte_level
    elif kinds and kinds <= _SPACED:
        spell = _spaced
    else:
        raise EyasError(
            f"model.tokenizer: {path} decodes by {', '.join(sorted(kinds)) or 'nothing'}; Eyas knows byte-level tokens and "
            f"those with byte fallback"
        )
    texts = {token: spell(text) for text, token in vocabulary.items()}
    spaced = spell is _spaced  # then an added token may be a run of spaces, spelt so
    texts |= {token.id: (_spaced(token.content) if spaced else token.content.encode()) for token in added}
    return [texts.get(token, b"") for token in range(max(texts) + 1)]


def _kinds(decoder: Mapping[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    return [decoder["type"], *(kind for inner in decoder.get("decoders", []) for kind in _kinds(inner))]


def _spaced(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("▁", " ").encode()
