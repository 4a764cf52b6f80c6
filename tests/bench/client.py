"""A client of the fast server in a process of its own: `python client.py eyas|parts|minimal FOLDER URL PROMPTS IN_FLIGHT`.

eyas: the whole of asking. parts: what each answer needs of it, one call after the other, and nothing that decides what to
ask, of whom and how much at once. minimal: the requests alone.

Prints one JSON object: CPU s and wall s of asking alone (start-up and the writing of the results left out), the longest
block of the event loop in ms, and the peak memory that asking added in MB.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import orjson
import uvloop

import eyas.asking
from eyas.config import Stages, load
from eyas.engines.sglang import Dialect, request_fields
from eyas.engines.sglang_replies import read_completion
from eyas.generate import GC_EVERY, Paths, generate
from eyas.journal import Answered, JournalWriter
from eyas.lengths import places
from eyas.plugins import GenerateRequest, registry
from eyas.recordfile import read_records, write_records
from eyas.records import Delivery, Message, Origin, Prompt, Reply, Response
from eyas.render import Renderer
from eyas.request import seed_of
from eyas.tokenizer import load_tokenizer
from eyas.units import Accepts, Plan, place
from eyas.wire import Session

QUESTION = "Why is the sky blue in the day, red at dusk and black at night? " * 4


def paths(folder: Path) -> Paths:
    return Paths(
        prompts=folder / "prompts.jsonl.zst",
        journal=folder / "journal",
        responses=folder / "responses.jsonl.zst",
        outcomes=folder / "outcomes.jsonl.zst",
        timing=folder / "timing.parquet",
        servers=folder / "servers.json",
        progress=folder / "status.json",
        audit=folder / "audit.jsonl",
    )


def prompt(n: int) -> Prompt:
    return Prompt(
        key=f"{n:016x}-0",
        messages=[Message(role="user", content=f"{n}: {QUESTION}")],
        turns=[],
        tools=[],
        origin=Origin(source="chat", revision=None, file="data.jsonl", row=n + 1),
        occurrence=0,
        group=f"{n:016x}",
    )


def resident() -> int:
    """MB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 // 1_000_000


class Watch:
    """CPU, wall clock, memory and event-loop blocks of what happens inside it."""

    def __enter__(self) -> Watch:
        self.before, self.peak, self.block, self.on = resident(), 0, 0.0, True
        self.thread = threading.Thread(target=self._memory)
        self.thread.start()
        self.started, self.cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu, self.wall = time.process_time() - self.cpu, time.perf_counter() - self.started
        self.on = False
        self.thread.join()

    def _memory(self) -> None:
        while self.on:
            self.peak = max(self.peak, resident())
            time.sleep(0.1)

    async def loop(self) -> None:
        """Measures CPU that passes between two turns of the event loop: other processes' time is not ours."""
        while True:
            cpu = time.process_time()
            await asyncio.sleep(0)
            self.block = max(self.block, time.process_time() - cpu)
            await asyncio.sleep(0.02)

    def tell(self) -> None:
        found = {"cpu": self.cpu, "wall": self.wall, "block_ms": self.block * 1e3}
        print(json.dumps(found | {"memory_mb": self.peak - self.before}))


def stages_of(folder: Path, url: str, in_flight: int) -> Stages:
    config = load(
        {
            "model": {
                "id": "model",
                "tokenizer": str(folder / "model"),
                "context": 8192,
                "kv_dtype": "bf16",
                "reasoning": {"name": "qwen3"},
            },
            "server": {
                "engine": {"name": "sglang", "model_path": str(folder / "model")},
                "url": url,
                "state": str(folder / "state"),
                "concurrency": in_flight,
            },
            "datasets": {
                "fake": {
                    "source": {"name": "magicoder"},
                    "files": ["x"],
                    "sampling": {"max_new_tokens": 2048},
                    "budget_tokens": 10**12,
                }
            },
        }
    )
    return Stages(config)


def eyas_client(folder: Path, url: str, in_flight: int) -> None:
    stages = stages_of(folder, url, in_flight)
    watch = Watch()
    run = eyas.asking.Asking.run

    async def watched(self: Any) -> None:
        with watch:
            looking = asyncio.create_task(watch.loop())
            await run(self)
            looking.cancel()

    eyas.asking.Asking.run = watched  # type: ignore[method-assign]
    generate(stages.generate("fake"), stages.access("fake"), paths(folder), registry())
    watch.tell()


def parts(folder: Path, url: str, in_flight: int) -> None:
    """Render, encode, request, decode, check and journal as the product does each of them."""
    settings = stages_of(folder, url, in_flight).generate("fake")
    plan, accepts = Plan(settings, paths(folder).prompts, registry()), Accepts(settings, registry())
    tokenizer = load_tokenizer(plan.settings.model)
    tokenizer.speed_up()
    renderer = Renderer(plan.settings.model, tokenizer, plan.reasoning.prefill)
    dialect = Dialect(prompt_end=30_000, vocabulary_size=None, seeded=True, ids_in_logprobs=False, loads=None)
    sampling, control = plan.settings.sampling, frozenset(tokenizer.control_ids)
    names = {token: text for text, token in tokenizer.added_tokens.items()}
    own = np.zeros(tokenizer.vocabulary_size, bool)
    own[list(names)] = True
    watch = Watch()

    async def ask_all(writer: JournalWriter) -> None:
        left = read_records(paths(folder).prompts, Prompt)
        async with Session() as session:

            async def ask() -> None:
                for prompt in left:
                    prompt_ids = renderer.render(prompt)
                    request = plan.request(prompt_ids, 0, 0)
                    asked = GenerateRequest(prompt_ids, sampling, seed_of(request))
                    body = msgspec.json.encode(request_fields(asked, 2048, tokenizer.stop_ids, dialect))
                    started = time.time()
                    status, raw = await session.post(f"{url}/generate", body)
                    found = read_completion(status, raw, 2048, stop_ids=tokenizer.stop_ids)
                    text, lengths = tokenizer.decode(found.output_ids)
                    ids = np.concatenate([places(prompt_ids), places(found.output_ids)])
                    added = {names[token]: token for token in sorted(set(ids[own.take(ids)].tolist()))}
                    reply = Reply(
                        request=request,
                        prompt_ids=prompt_ids,
                        output_ids=found.output_ids,
                        finish=found.finish,
                        text=text,
                        text_lengths=lengths,
                        stop_ids=tokenizer.stop_ids,
                        added_tokens=added,
                        control_ids=[token for token in added.values() if token in control],
                        effective_max_new=found.effective_max_new,
                        constrained=False,
                    )
                    accepts.tokens(place(reply, prompt.key, 0, 0))
                    delivery = Delivery(
                        attempt=1, server="0" * 32, started=started, finished=time.time(), usage=found.usage
                    )
                    writer.append(Answered(reply=reply, delivery=delivery))

            with watch:
                looking = asyncio.create_task(watch.loop())
                await asyncio.gather(*(ask() for _ in range(in_flight)))
                looking.cancel()

    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_EVERY)
    with JournalWriter(folder / "parts") as writer:
        uvloop.run(ask_all(writer))
    watch.tell()


def minimal(folder: Path, url: str, in_flight: int) -> None:
    """The least that asks the same: aiohttp on uvloop, orjson on both ends."""
    responses = read_records(paths(folder).responses, Response)
    prompts = [(response.request, response.prompt_ids) for response in responses]
    watch = Watch()

    async def ask_all() -> None:
        left = iter(prompts)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask() -> None:
                for request, ids in left:
                    fields = {"max_new_tokens": 2048, "temperature": 1.0, "top_p": 1.0}
                    body = orjson.dumps({"rid": request, "input_ids": ids, "sampling_params": fields})
                    headers = {"Content-Type": "application/json"}
                    async with session.post(f"{url}/generate", data=body, headers=headers) as reply:
                        assert orjson.loads(await reply.read())["output_ids"]

            with watch:
                looking = asyncio.create_task(watch.loop())
                await asyncio.gather(*(ask() for _ in range(in_flight)))
                looking.cancel()

    uvloop.run(ask_all())
    watch.tell()


if __name__ == "__main__":
    mode, folder, url, prompts, in_flight = (
        sys.argv[1],
        Path(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
        int(sys.argv[5]),
    )
    if mode == "eyas":
        write_records(paths(folder).prompts, map(prompt, range(prompts)))
        eyas_client(folder, url, in_flight)
    elif mode == "parts":
        parts(folder, url, in_flight)
    else:
        minimal(folder, url, in_flight)
