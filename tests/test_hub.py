"""What the config may call a thing on the hub, and which files make a tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eyas.hub import Reference, file_reference, files_digest, model_reference, tokenizer_files

COMMIT = "3e60763aa0b4f7b2a1c9e3d0f5a6b7c8d9e0f1a2"


def test_a_model_lies_in_a_folder_of_its_revision() -> None:
    found = model_reference(f"hub://moonshotai/Kimi-K2.5@{COMMIT}")
    assert found == Reference("models", "moonshotai/Kimi-K2.5", COMMIT)
    assert found.place == Path("data/hub/models/moonshotai/Kimi-K2.5", COMMIT)


def test_a_dataset_s_file_lies_under_its_own_path() -> None:
    found = file_reference("hub://datasets/HuggingFaceH4/ultrachat_200k@v1.0/data/train sft-0.parquet")
    assert found.place == Path("data/hub/datasets/HuggingFaceH4/ultrachat_200k/v1.0/data/train sft-0.parquet")


@pytest.mark.parametrize(
    "text", ["hub://a/b", "hub://datasets/a/b/c.parquet", "hub://datasets/a/b/c@d.parquet"]
)
def test_a_revision_must_be_given(text: str) -> None:
    read = file_reference if "datasets" in text else model_reference
    with pytest.raises(
        ValueError, match=r"names no revision; pin one, best a commit, as in hub://(datasets/)?a/b@REVISION"
    ):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        "hub://a@r",
        "hub://a/b/c@r",
        "hub://../b@r",
        "hub://a/b@..",
        "hub://a/b@r/x",
        "hub://a/b@",
        "hub:///b@r",
    ],
)
def test_what_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no model on the hub; write hub://ORG/NAME@REVISION"):
        model_reference(text)


@pytest.mark.parametrize(
    "text",
    [
        "hub://a/b@r/x.parquet",
        "hub://datasets/a/b@r",
        "hub://datasets/a/b@r/",
        "hub://datasets/a/b@r/../x",
        "hub://datasets/a/b@r/x//y",
        "hub://datasets/a@r/x",
    ],
)
def test_what_is_no_file_of_a_dataset_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="is no file on the hub; write hub://datasets/ORG/NAME@REVISION/PATH"
    ):
        file_reference(text)


KIMI = [
    ".gitattributes",
    "LICENSE",
    "README.md",
    "chat_template.jinja",
    "config.json",
    "configuration_deepseek.py",
    "docs/deploy_guidance.md",
    "figures/x.json",
    "generation_config.json",
    "model-00001-of-000064.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "tiktoken.model",
    "tokenization_kimi.py",
    "tokenizer_config.json",
    "trainer_state.json",
    "additional_chat_templates/tool_use.jinja",
]
PLAIN = [
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tiktoken.model",
    "tokenizer_config.json",
]


def test_a_tokenizer_is_its_own_files_and_no_weights() -> None:
    assert tokenizer_files(KIMI, code=False) == PLAIN
    assert tokenizer_files(KIMI, code=True) == sorted(
        [*PLAIN, "configuration_deepseek.py", "tokenization_kimi.py"]
    )


def test_the_digest_changes_with_the_tokenizer_and_with_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    for name in KIMI:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    first = files_digest(folder, code=False)
    shutil.copytree(folder, tmp_path / "b")
    assert files_digest(tmp_path / "b", code=False) == first
    for name in set(KIMI) - set(PLAIN):
        (folder / name).write_text("other")
    assert files_digest(folder, code=False) == first
    assert files_digest(folder, code=True) != files_digest(tmp_path / "b", code=True)
    seen = {first}
    for name in PLAIN:
        (folder / name).write_text("other")
        seen.add(files_digest(folder, code=False))
    (folder / PLAIN[0]).rename(folder / "tokenizer.json")
    seen.add(files_digest(folder, code=False))
    assert len(seen) == 2 + len(PLAIN)
