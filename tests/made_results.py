"""A small results/ folder written by the real writers, for the tests of what reads one."""

import shutil
from pathlib import Path

import msgspec
from helpers import lengths_of, reply

from eyas.config import ExportSettings, Stages, load
from eyas.export import export
from eyas.fit import mix_fit
from eyas.mix import MixReport, SideCounts
from eyas.plugins import registry
from eyas.prompts import FileReport, KeysDigest, PromptsReport
from eyas.recordfile import write_records
from eyas.records import Message, Origin, Outcome, Prompt, Response, TrainMetadata, TrainRow, Verdict, unit_id
from eyas.tables import write_table
from eyas.timing import Timing, TimingWriter
from eyas.train import SCHEMA
from eyas.verdicts import write_verdicts

SHA = "ab" * 32
START = 1_700_000_000.0


def verdict(key: str, output: int, *, reasons: tuple[str, ...] = (), **fields: object) -> Verdict:
    """A verdict on an answer of `output` tokens, two fifths of them reasoning."""
    reasoning = output * 2 // 5
    values = {
        "turn": 0,
        "sample": 0,
        "marks": [],
        "truncated": False,
        "constrained": False,
        "reasoning_state": "closed",
        "prompt_tokens": 50,
    } | fields
    return Verdict(
        key=key,
        accepted=not reasons,
        reasons=list(reasons),
        reasoning_tokens=reasoning,
        answer_tokens=output - reasoning,
        output_tokens=output,
        **values,
    )


def write_dataset(
    folder: Path,
    verdicts: list[Verdict],
    *,
    others: tuple[Outcome, ...] = (),
    seconds: float = 10.0,
    at_once: int = 2,
    start: float = START,
    server: str = "server-1",
    said: tuple[str, str, str] = ("Hello", "Let me think.</think>", "It is so."),
) -> Path:
    """All files of one dataset but stats.json. Each answer took `seconds`, `at_once` of them side by side.

    said: prompt, reasoning and answer of each.
    """
    folder.mkdir(parents=True)
    answered = [Outcome(key=v.key, turn=v.turn, sample=v.sample, status="answered") for v in verdicts]
    keys = list(dict.fromkeys(outcome.key for outcome in [*answered, *others]))
    outcomes = sorted([*answered, *others], key=lambda outcome: keys.index(outcome.key))
    report = PromptsReport(
        dataset=folder.name,
        asked=len(keys),
        rows_read=len(keys) + 3,
        used=len(keys),
        turns=len({(outcome.key, outcome.turn) for outcome in outcomes}),
        keys=KeysDigest(keys).hex(),
        not_taken=1,
        skipped={"no user turn": 2},
        files=[FileReport(name="part-0.jsonl", rows=len(keys) + 3, sha256=SHA)],
        evaluation=[],
    )
    (folder / "prompts.json").write_bytes(msgspec.json.encode(report))
    write_records(
        folder / "prompts.jsonl.zst",
        [
            Prompt(
                key=key,
                messages=[Message(role="user", content=said[0])],
                turns=[],
                tools=[],
                origin=Origin(source="glaive", revision="abc123", file="part-0.jsonl", row=row),
                occurrence=0,
                group="g",
            )
            for row, key in enumerate(keys, 1)
        ],
    )
    write_records(folder / "outcomes.jsonl.zst", outcomes)
    write_records(
        folder / "responses.jsonl.zst", [_response(at, one, *said[1:]) for at, one in enumerate(verdicts)]
    )
    write_verdicts(folder / "verdicts.parquet", verdicts)
    with TimingWriter(folder / "timing.parquet") as timing:
        for at, one in enumerate(verdicts):
            begin = start + at // at_once * seconds
            timing.write(
                Timing(
                    request=f"r{at}",
                    attempt=1,
                    server=server,
                    started=begin,
                    finished=begin + seconds,
                    prompt_tokens=one.prompt_tokens,
                    output_tokens=one.output_tokens,
                    used=True,
                )
            )
    rows = [train_row(folder.name, one) for one in verdicts if one.accepted]
    write_table(folder / "train.parquet", SCHEMA, rows)
    return folder


def train_row(dataset: str, one: Verdict) -> TrainRow:
    """The training row of an accepted answer; its ids count up."""
    return TrainRow(
        id=f"{dataset}/{unit_id(one.key, one.turn, one.sample)}",
        primary_id=f"{dataset}/{one.key}",
        input_ids=list(range(one.prompt_tokens + one.output_tokens)),
        loss_mask=[0] * one.prompt_tokens + [1] * one.output_tokens,
        metadata=TrainMetadata(
            dataset=dataset,
            group="g",
            request="r",
            finish="length" if one.truncated else "stop",
            truncated=one.truncated,
            constrained=one.constrained,
            reasoning_tokens=one.reasoning_tokens,
            answer_tokens=one.answer_tokens,
        ),
    )


def _response(at: int, one: Verdict, reasoning: str, answer: str) -> Response:
    text = reasoning + answer
    ends = [len(reasoning)] * one.reasoning_tokens + [len(text)] * one.answer_tokens
    made = reply(f"r{at}", output_ids=[9] * one.output_tokens, text=text, text_lengths=lengths_of(ends))
    return Response(
        key=one.key,
        turn=one.turn,
        sample=one.sample,
        **{name: getattr(made, name) for name in made.__struct_fields__},
    )


def write_training_set(results: Path) -> list[Path]:
    """The mix of all datasets in `results`, told of by its report alone, and its exports, whose paths are returned."""
    folder = results / "train"
    datasets = sorted(path.parent.name for path in results.glob("*/train.parquet"))
    exports = [folder / "exports" / "tokens" / f"{side}.jsonl.zst" for side in ("train", "eval")]
    exports[0].parent.mkdir(parents=True)
    for side in ("train", "eval"):
        shutil.copy(results / datasets[0] / "train.parquet", folder / f"{side}.parquet")
    for path in exports:
        write_export(path, folder / f"{path.name.partition('.')[0]}.parquet")
    sides = {name: SideCounts(rows=3, supervised_tokens=600) for name in datasets}
    none = {name: SideCounts() for name in datasets}
    fit = mix_fit(folder / "train.parquet")
    report = MixReport(train=sides, eval=none, dropped_by_weights=none, fit=fit)
    (folder / "mix.json").write_bytes(msgspec.json.encode(report))
    return exports


def write_export(path: Path, table: Path) -> None:
    """The export `tokens` of a table, and its report."""
    export(ExportSettings(exporter="tokens", options={}), table, path, registry())


def stages(datasets: dict[str, dict[str, object]], **sections: object) -> Stages:
    """A run of these datasets, each with what its section says beyond source and files."""
    config = {
        "model": {"id": "org/tiny", "revision": "abc", "reasoning": {"name": "tags"}},
        "server": {"engine": {"name": "llamacpp", "model_file": "tiny.gguf"}},
        "datasets": {
            name: {"source": {"name": "glaive"}, "files": ["x"], "revision": "abc123", **section}
            for name, section in datasets.items()
        },
    }
    return Stages(load(config | sections))
