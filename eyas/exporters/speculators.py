"""The folder that vLLM's speculators trains from: what its prepare_data writes, without its tokenizer or a GPU."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from eyas.exporters.tokens import Masked
from eyas.plugins import Reading, Register, hookimpl

ARROW, FREQUENCIES = "data-00000-of-00001.arrow", "token_freq.pt"
BATCH_ROWS = 256
EPOCH = (
    1980,
    1,
    1,
    0,
    0,
    0,
)  # the earliest date that a zip file can hold, so that equal data are equal bytes


class Speculators(Masked):
    """A folder with an Arrow dataset (input_ids, loss_mask, seq_len) and token_freq.pt, as speculators' prepare_data writes it."""

    # Columns and types: speculators 0.9 data_generation/preprocessing.py; `datasets` writes an Arrow stream, state.json and
    # dataset_info.json (Dataset.save_to_disk). The state's format `torch` is what speculators' ArrowDataset counts on.
    name: ClassVar[str] = "speculators"
    suffix: ClassVar[str] = ""

    def write(self, rows: Iterable[Any], path: Path) -> int:
        import numpy as np
        import pyarrow as pa

        from eyas.recordfile import atomic_folder

        ids, mask = (pa.field(name, pa.list_(pa.int64())) for name in ("input_ids", "loss_mask"))
        schema = pa.schema([ids, mask, pa.field("seq_len", pa.int64())])
        counts = np.zeros(0, np.int64)
        count, digest = 0, hashlib.sha256()
        source = iter(rows)
        with atomic_folder(path) as folder:
            with pa.ipc.new_stream(str(folder / ARROW), schema) as sink:
                while batch := list(islice(source, BATCH_ROWS)):
                    masks = [self.mask(row) for row in batch]
                    lengths = [len(row.input_ids) for row in batch]
                    sink.write_batch(
                        pa.record_batch(
                            [
                                _lists([row.input_ids for row in batch]),
                                _lists(masks),
                                pa.array(lengths, pa.int64()),
                            ],
                            schema=schema,
                        )
                    )
                    tokens = np.concatenate([np.array(row.input_ids, np.int64) for row in batch])
                    supervised = np.concatenate([np.array(one, np.bool_) for one in masks])
                    found = np.bincount(tokens[supervised], minlength=len(counts))
                    found[: len(counts)] += counts
                    counts, count = found, count + len(batch)
                    digest.update(tokens.tobytes())
            frequencies = {int(token): int(counts[token]) for token in np.flatnonzero(counts)}
            (folder / FREQUENCIES).write_bytes(torch_file(frequencies))
            for name, content in _descriptions(digest.hexdigest()[:16]).items():
                (folder / name).write_text(json.dumps(content, indent=2))
        return count

    def read(self, path: Path) -> Iterator[Reading]:
        import pyarrow as pa

        with pa.memory_map(str(path / ARROW)) as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                ids, masks = (batch.column(name).to_pylist() for name in ("input_ids", "loss_mask"))
                yield from map(Reading, ids, masks)


def _lists(values: list[list[int]]) -> Any:
    import numpy as np
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(values).astype(np.int64)))


def _descriptions(fingerprint: str) -> dict[str, dict[str, Any]]:
    """The two files beside the Arrow file, by name."""
    whole = {"dtype": "int64", "_type": "Value"}
    # "Sequence" is what `datasets` below 4 calls a list; later ones read it too.
    lists = {"feature": whole, "length": -1, "_type": "Sequence"}
    return {
        "dataset_info.json": {
            "citation": "",
            "description": "",
            "features": {"input_ids": lists, "loss_mask": lists, "seq_len": whole},
            "homepage": "",
            "license": "",
        },
        "state.json": {
            "_data_files": [{"filename": ARROW}],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        },
    }


def torch_file(value: dict[int, int]) -> bytes:
    """What `torch.save` makes of plain Python values: a zip file, not compressed, that holds a pickle of protocol 2.

    Source: PyTorch, torch/serialization.py and caffe2/serialize/inline_container.h. Equal values give equal bytes.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, content in (
            ("data.pkl", pickle.dumps(value, protocol=2)),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            file.writestr(zipfile.ZipInfo(f"archive/{name}", EPOCH), content)
    return buffer.getvalue()


@hookimpl
def register_exporters(register: Register) -> None:
    register(Speculators)
