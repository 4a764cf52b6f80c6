"""A tokenizer in Python code over tiktoken, in the manner of Kimi-K2.5's: a slow tokenizer with an `encode` of its own.

Written for Eyas' tests. Loaded by transformers with `trust_remote_code`, as the real one is.
"""

import json
from pathlib import Path

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

ORDINARY = 163_584
RESERVED = 256
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class StandinTokenizer(PreTrainedTokenizer):
    """`vocab_file` is a tiktoken table; ids from ORDINARY on are special to tiktoken, named or reserved."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012 (as transformers declares it)

    def __init__(self, vocab_file, added_tokens_decoder=None, **options):
        # A prefix of the ranks of a byte-pair encoding is one itself.
        ranks = {token: rank for token, rank in load_tiktoken_bpe(vocab_file).items() if rank < ORDINARY}
        named = {token: text.content for token, text in (added_tokens_decoder or {}).items()}
        special = {
            named.get(token, f"<|reserved_token_{token}|>"): token
            for token in range(ORDINARY, ORDINARY + RESERVED)
        }
        self.model = tiktoken.Encoding(
            Path(vocab_file).name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        spelling = bytes_to_unicode()
        self.decoder = {
            token: "".join(spelling[byte] for byte in self.model.decode_single_token_bytes(token))
            for token in range(self.model.n_vocab)
        }
        self.encoder = {text: token for token, text in self.decoder.items()}
        self.bytes_of = {character: byte for byte, character in spelling.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **options)

    def encode(self, text, allow_special_tokens=True, **options):
        if options:
            return super().encode(text, **options)
        if allow_special_tokens:
            return self.model.encode(text, allowed_special="all")
        return self.model.encode(text, disallowed_special=())

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self.encoder

    def _tokenize(self, text, **_options):
        return [self.decoder[token] for token in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.encoder.get(token)

    def _convert_id_to_token(self, index):
        return self.decoder.get(index)

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes_of[character] for token in tokens for character in token).decode(
            errors="replace"
        )

    def apply_chat_template(self, conversation, tools=None, tokenize=False, thinking=True, **options):
        """Tools reach the template as TypeScript, as K2.5's do."""
        if tools:
            options["tools_ts_str"] = "\n".join(
                f"type {tool['function']['name']} = (_: {json.dumps(tool['function'].get('parameters', {}))}) => any;"
                for tool in tools
            )
        return super().apply_chat_template(
            conversation, tools=tools, tokenize=tokenize, thinking=thinking, **options
        )
