"""Brings a tokenizer, or one file of a dataset, from the Hugging Face hub.

What is under way lies in data/hub/.incoming/, where an interrupted download goes on; it is moved into place when its
bytes are those that the hub told of, and the manifest is written last.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from eyas.errors import EyasError
from eyas.hub import FOLDER, FetchedFile, Manifest, Reference, files_in, tokenizer_files
from eyas.recordfile import atomic

INCOMING = Path(FOLDER, ".incoming")

log = logging.getLogger(__name__)


def fetch(wanted: Reference, key: str, *, code: bool) -> None:
    """Fetches `wanted` to its place, which config key `key` asks for. code: with the tokenizer's Python files.

    Raises EyasError that names key and remedy.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with _explained(wanted, key):
        found = HfApi().repo_info(
            wanted.repo, repo_type=wanted.kind[:-1], revision=wanted.revision, files_metadata=True
        )
    commit, listed = str(found.sha), {file.rfilename: file for file in found.siblings or []}
    names = _names(wanted, key, list(listed), code)
    home = Path(FOLDER, wanted.kind, wanted.repo, wanted.revision)
    incoming = INCOMING / wanted.kind / wanted.repo / commit / (wanted.path or "tokenizer")
    fetched = [
        _whole(home / name, listed[name]) or _fetch_file(wanted, key, commit, listed[name], incoming)
        for name in names
    ]
    for file in fetched:
        if (incoming / file.name).exists():
            (home / file.name).parent.mkdir(parents=True, exist_ok=True)
            (incoming / file.name).replace(home / file.name)
    if wanted.kind == "models":
        for name in set(files_in(home, code=True)).difference(names):
            (home / name).unlink()  # of an earlier fetch
    manifest = Manifest(wanted.repo, wanted.revision, commit, fetched)
    with atomic(wanted.manifest) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    shutil.rmtree(incoming, ignore_errors=True)


def _names(wanted: Reference, key: str, listed: list[str], code: bool) -> list[str]:
    repo = f"{wanted.repo} at {wanted.revision}"
    if wanted.kind == "datasets":
        if wanted.path in listed:
            return [wanted.path]
        close = difflib.get_close_matches(wanted.path, listed, n=1)
        hint = f"did you mean {close[0]}?" if close else f"correct it; there are {len(listed)} other files"
        raise EyasError(f"{key}: {repo} has no file {wanted.path}; {hint}")
    names = tokenizer_files(listed, code=code)
    if not any(name.startswith("tokenizer") or name.endswith(".model") for name in names):
        raise EyasError(f"{key}: {repo} has no tokenizer; name the repository of the model itself")
    return names


def _fetch_file(wanted: Reference, key: str, commit: str, listed: Any, incoming: Path) -> FetchedFile:
    from huggingface_hub import hf_hub_download

    name: str = listed.rfilename
    log.info("fetching %s of %s, %s bytes", name, wanted.repo, f"{listed.size or 0:,}")
    with _explained(wanted, key):
        path = Path(
            hf_hub_download(
                wanted.repo, name, repo_type=wanted.kind[:-1], revision=commit, local_dir=incoming
            )
        )
    whole = _whole(path, listed)
    if whole is None:
        path.unlink()
        raise EyasError(
            f"{key}: {name} of {wanted.repo} came with other bytes than the hub tells of; run the same command again"
        )
    return whole


def _whole(path: Path, listed: Any) -> FetchedFile | None:
    """The file at `path`, if it is there with the bytes that the hub tells of."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
            blob.update(chunk)
    # Large files are known by their SHA-256, others by git's name for their bytes.
    told, ours = (listed.lfs.sha256, sha256) if listed.lfs else (listed.blob_id, blob)
    return FetchedFile(listed.rfilename, size, sha256.hexdigest()) if ours.hexdigest() == told else None


@contextmanager
def _explained(wanted: Reference, key: str) -> Iterator[None]:
    """Turns what the hub's client raises into one line."""
    from huggingface_hub import errors
    from requests import RequestException

    what = f"{wanted.kind[:-1]} {wanted.repo}"
    try:
        yield
    except errors.GatedRepoError:
        raise EyasError(
            f"{key}: {what} is gated; accept its terms on the hub, and set HF_TOKEN to a token that may read it"
        ) from None
    except errors.RevisionNotFoundError:
        raise EyasError(f"{key}: {what} has no revision {wanted.revision}; correct it") from None
    except errors.RepositoryNotFoundError:
        raise EyasError(
            f"{key}: the hub has no {what}, or it is private; correct the name, or set HF_TOKEN to a token that may read it"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise EyasError(f"{key}: {what} {_elsewhere(wanted)} (HF_HUB_OFFLINE is set here)") from None
    except (errors.LocalEntryNotFoundError, errors.FileMetadataError) as error:
        raise _unreachable(wanted, key, error) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "none"
        raise EyasError(
            f"{key}: the hub answers for {what} with HTTP status {status}; run the same command again: what has come is kept"
        ) from error
    except RequestException as error:
        raise _unreachable(wanted, key, error) from error


def _unreachable(wanted: Reference, key: str, error: Exception) -> EyasError:
    endpoint = os.environ.get("HF_ENDPOINT", "the hub")
    return EyasError(
        f"{key}: {endpoint} cannot be reached, or the connection broke ({type(error).__name__}); run the same command again: "
        f"what has come is kept. Without a network: {wanted.repo} {_elsewhere(wanted)}"
    )


def _elsewhere(wanted: Reference) -> str:
    return f"has not been fetched; run `snakemake --cores 1 fetch` where there is a network and copy {FOLDER} from there"
