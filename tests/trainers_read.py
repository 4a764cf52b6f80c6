"""Reads exports by the trainers' own code; a program, run by the interpreter that has torch and the trainers.

`python trainers_read.py EXPORTS READER`: EXPORTS is JSON with the paths of exports and tokenizer. Writes JSON to stdout: [ids, mask] of each row.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def numbers(row) -> list[list[int]]:
    return [[int(value) for value in column.reshape(-1).tolist()] for column in row]


def specforge(path, tokenizer, **options):
    from specforge.data.prompt_builder import prepare_prompt_tasks

    tasks = prepare_prompt_tasks(
        path,
        tokenizer,
        chat_template="qwen3-thinking",
        max_length=4096,
        train_only_last_turn=True,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
        **options,
    )
    return [[list(map(int, task["payload"][name])) for name in ("input_ids", "loss_mask")] for task in tasks]


def read(reader, exports):
    from transformers import AutoTokenizer

    paths, tokenizer = exports["paths"], AutoTokenizer.from_pretrained(exports["tokenizer"])
    if reader == "SpecForge tokens":
        return specforge(paths["tokens"], tokenizer, is_preformatted=False)
    if reader == "SpecForge conversations":
        return specforge(paths["specforge"], tokenizer, is_preformatted=False)
    if reader == "SpecForge text":
        return specforge(paths["specforge_text"], tokenizer, is_preformatted=True)
    if reader == "speculators folder":
        import torch
        from datasets import load_from_disk

        rows = load_from_disk(paths["speculators"])
        assert list(rows.with_format(None)["seq_len"]) == [len(row["input_ids"]) for row in rows]
        counted: dict[int, int] = {}
        for row in rows:
            for token in row["input_ids"][row["loss_mask"].to(torch.bool)].tolist():
                counted[token] = counted.get(token, 0) + 1
        assert torch.load(paths["speculators"] + "/token_freq.pt", weights_only=True) == counted
        return [numbers((row["input_ids"], row["loss_mask"])) for row in rows]
    from datasets import load_dataset

    template = Path(paths["modelopt"], "chat_template.jinja").read_text(encoding="utf-8")
    conversations = load_dataset("json", data_files=paths["modelopt"] + "/conversations.jsonl", split="train")
    if reader == "Model-Optimizer, streaming":
        from modelopt.torch.speculative.plugins.hf_streaming_dataset import _tokenize_with_loss_mask

        tokenizer.chat_template = template
        return [numbers(_tokenize_with_loss_mask(tokenizer, row["messages"], True)) for row in conversations]
    assert reader == "Model-Optimizer, online"
    from modelopt.torch.utils.plugins.transformers_dataset import LanguageDataCollator

    collate = LanguageDataCollator(
        tokenizer,
        train_len=512,
        chat_template=template,
        answer_only_loss=True,
        shift_labels=False,
        return_labels=True,
    )
    found = []
    for row in conversations:
        batch = collate([row])
        kept = batch["attention_mask"][0].bool()
        labels = batch["labels"][0][kept]
        found.append(numbers((batch["input_ids"][0][kept], (labels != -100).long())))
    return found


if __name__ == "__main__":
    result = read(sys.argv[2], json.loads(Path(sys.argv[1]).read_text()))
    print("\n" + json.dumps(result))
