"""What comes from the hub is whole or not there, is what was asked for, and says what is wrong if it cannot come."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fake_hub import COMMIT, Hub, hub

from eyas.hub import Manifest, reference

pytestmark = pytest.mark.service

ROOT = Path(__file__).parent.parent
PARQUET = random.Random(0).randbytes(25_000_000)
CHUNK = 10 * 1024 * 1024  # huggingface_hub writes so many bytes at a time
KIMI = {
    "README.md": b"# Kimi",
    "chat_template.jinja": b"{{ messages }}",
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"w" * 5_000,
    "model.safetensors.index.json": b"{}",
    "tiktoken.model": b"IQ== 0\n" * 400,
    "tokenization_kimi.py": b"import os",
    "tokenizer_config.json": b"{}",
}
PLAIN = ["chat_template.jinja", "config.json", "tiktoken.model", "tokenizer_config.json"]
MODEL, FILE = "hub://moonshotai/Kimi@v1", "hub://datasets/org/set@v1/data/train.parquet"


@pytest.fixture
def served() -> Iterator[Hub]:
    repos = {
        "models/moonshotai/Kimi": dict(KIMI),
        "models/org/weights": {"model.safetensors": b"w"},
        "datasets/org/set": {"data/train.parquet": PARQUET, "data/test.parquet": b"x"},
    }
    with hub(repos) as known:
        yield known


def fetch(
    known: Hub, folder: Path, wanted: str, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "fetch.py"), "--reference", wanted, "--key", "the.key"]
    return subprocess.run(
        [*command, "--log", "fetch.log", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": known.url, "HF_HOME": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    return done.stderr.splitlines()[-1].removeprefix("eyas fetch: error: ")


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_tokenizer_comes_without_weights_and_code(served: Hub, tmp_path: Path) -> None:
    done = fetch(served, tmp_path, MODEL)
    assert done.returncode == 0, done.stderr
    place = tmp_path / "data/hub/models/moonshotai/Kimi/v1"
    assert names(tmp_path / "data") == [
        f"hub/models/moonshotai/Kimi/v1/{name}" for name in sorted([*PLAIN, "manifest.json"])
    ]
    assert all((place / name).read_bytes() == KIMI[name] for name in PLAIN)
    manifest = msgspec.json.decode((place / "manifest.json").read_bytes(), type=Manifest)
    assert (manifest.repo, manifest.revision, manifest.commit) == ("moonshotai/Kimi", "v1", COMMIT)
    assert {file.name: (file.size, file.sha256) for file in manifest.files} == {
        name: (len(KIMI[name]), hashlib.sha256(KIMI[name]).hexdigest()) for name in PLAIN
    }
    assert not any("safetensors" in path for _, path, _ in served.requests)


def test_code_comes_only_if_it_is_trusted_and_goes_when_it_is_not(served: Hub, tmp_path: Path) -> None:
    place = tmp_path / "data/hub/models/moonshotai/Kimi/v1"
    assert fetch(served, tmp_path, MODEL, "--code").returncode == 0
    assert names(place) == sorted([*PLAIN, "manifest.json", "tokenization_kimi.py"])
    assert fetch(served, tmp_path, MODEL).returncode == 0
    assert names(place) == sorted([*PLAIN, "manifest.json"])


def test_a_file_of_a_dataset_comes_to_its_own_path(served: Hub, tmp_path: Path) -> None:
    assert fetch(served, tmp_path, FILE).returncode == 0
    place = tmp_path / "data/hub/datasets/org/set/v1/data"
    assert (place / "train.parquet").read_bytes() == PARQUET
    assert names(tmp_path / "data/hub") == [
        f"datasets/org/set/v1/data/train.parquet{end}" for end in ("", ".manifest.json")
    ]


def test_what_is_here_already_is_not_fetched_again(served: Hub, tmp_path: Path) -> None:
    assert fetch(served, tmp_path, FILE).returncode == 0
    (tmp_path / reference(FILE).manifest).unlink()
    served.requests.clear()
    assert fetch(served, tmp_path, FILE).returncode == 0
    assert [method for method, path, _ in served.requests if "resolve" in path] == []
    assert (tmp_path / reference(FILE).manifest).is_file()


def test_an_interrupted_download_leaves_nothing_that_looks_whole_and_goes_on(
    served: Hub, tmp_path: Path
) -> None:
    served.cut = 15_000_000
    assert "run the same command again: what has come is kept" in error(fetch(served, tmp_path, FILE))
    assert not (tmp_path / "data/hub/datasets").exists()
    served.requests.clear()
    assert fetch(served, tmp_path, FILE).returncode == 0
    assert (tmp_path / reference(FILE).place).read_bytes() == PARQUET
    assert [range for method, _, range in served.requests if method == "GET" and range] == [f"bytes={CHUNK}-"]


def test_other_bytes_than_the_hub_tells_of_are_not_taken(served: Hub, tmp_path: Path) -> None:
    served.wrong = True
    for wanted, name in (
        (FILE, "data/train.parquet of org/set"),
        (MODEL, "chat_template.jinja of moonshotai/Kimi"),
    ):
        assert error(fetch(served, tmp_path, wanted)) == (
            f"the.key: {name} came with other bytes than the hub tells of; run the same command again"
        )
    assert not (tmp_path / "data/hub/datasets").exists() and not (tmp_path / "data/hub/models").exists()
    served.wrong = False
    assert fetch(served, tmp_path, FILE).returncode == 0


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            "hub://org/nothing@v1",
            "the hub has no model org/nothing, or it is private; correct the name, or set HF_TOKEN to a token that may read it",
        ),
        (
            "hub://datasets/org/nothing@v1/x",
            "the hub has no dataset org/nothing, or it is private; correct the name, or ",
        ),
        ("hub://moonshotai/Kimi@v2", "model moonshotai/Kimi has no revision v2; correct it"),
        ("hub://datasets/org/set@v2/x", "dataset org/set has no revision v2; correct it"),
        (
            "hub://datasets/org/set@v1/data/trian.parquet",
            "org/set at v1 has no file data/trian.parquet; did you mean data/train.parquet?",
        ),
        (
            "hub://datasets/org/set@v1/zzz",
            "org/set at v1 has no file zzz; correct it; there are 2 other files",
        ),
        (
            "hub://org/weights@v1",
            "org/weights at v1 has no tokenizer; name the repository of the model itself",
        ),
    ],
)
def test_what_the_hub_does_not_have_is_told_with_key_and_remedy(
    served: Hub, tmp_path: Path, wanted: str, said: str
) -> None:
    assert error(fetch(served, tmp_path, wanted)).startswith(f"the.key: {said}")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "model moonshotai/Kimi is gated; accept its terms on the hub, and set HF_TOKEN"),
        (
            500,
            "",
            "the hub answers for model moonshotai/Kimi with HTTP status 500; run the same command again",
        ),
    ],
)
def test_what_the_hub_refuses_is_told_with_key_and_remedy(
    served: Hub, tmp_path: Path, status: int, code: str, said: str
) -> None:
    served.status, served.error = status, code
    assert error(fetch(served, tmp_path, MODEL)).startswith(f"the.key: {said}")


def test_without_a_network_the_remedy_is_another_machine(served: Hub, tmp_path: Path) -> None:
    elsewhere = "has not been fetched; run `snakemake --cores 1 fetch` where there is a network and copy data/hub from there"
    said = error(fetch(served, tmp_path, MODEL, HF_HUB_OFFLINE="1"))
    assert said == f"the.key: model moonshotai/Kimi {elsewhere} (HF_HUB_OFFLINE is set here)"
    assert served.requests == []
    said = error(fetch(served, tmp_path, MODEL, HF_ENDPOINT="http://127.0.0.1:1"))
    assert said.startswith(
        "the.key: http://127.0.0.1:1 cannot be reached, or the connection broke (ConnectionError); "
    )
    assert elsewhere in said
