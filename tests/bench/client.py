"""A client of the fake server in a process of its own; prints the CPU s that its requests cost, start-up left out.

`python client.py eyas|minimal FOLDER URL PROMPTS`: `eyas` generates and `minimal` then asks the same with a bare loop.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import msgspec
from fake_llamacpp import make_model

from eyas.config import AccessSettings, GenerateSettings, ModelConfig, SamplingConfig, ServerConfig
from eyas.generate import Paths, generate
from eyas.plugins import registry
from eyas.recordfile import read_records, write_records
from eyas.records import Message, Origin, Prompt, Response
from eyas.request import seed_of

CONCURRENCY = 64
REASONING = {"name": "tags", "opened_by_prompt": True, "prefill": "<think>\n"}
MODEL = ModelConfig(id="fake", context=4096, quantisation="Q4_1", tools="system", reasoning=REASONING)
SAMPLING = SamplingConfig(max_new_tokens=512)
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
    )


def prompt(n: int) -> Prompt:
    return Prompt(
        key=f"{n:016x}-0",
        messages=[Message(role="user", content=f"{n}: {QUESTION}")],
        tools=[],
        origin=Origin(source="chat", revision=None, file="data.jsonl", row=n + 1),
        occurrence=0,
        group=f"{n:016x}",
    )


def eyas(folder: Path, url: str) -> None:
    # Everything that a first request loads: whoever asks for 100,000 answers pays it once.
    import requests  # noqa: F401

    import eyas.asking
    import eyas.server.lease  # noqa: F401

    settings = GenerateSettings(
        dataset="fake",
        model=MODEL,
        sampling=SAMPLING,
        samples=1,
        reasoning_required=True,
        budget_tokens=None,
        checks=None,
    )
    server = ServerConfig(
        engine={"name": "llamacpp", "model_file": str(make_model(folder / "tiny.gguf"))},
        url=url,
        state=str(folder / "state"),
        concurrency=CONCURRENCY,
    )
    access = AccessSettings(model=MODEL, server=server, plugins=[])
    started = time.process_time()
    generate(settings, access, paths(folder), registry())
    print(time.process_time() - started)


def minimal(folder: Path, url: str) -> None:
    import aiohttp

    from eyas.engines.llamacpp import REPLY_FIELDS, request_fields

    bodies = [
        msgspec.json.encode(
            request_fields(response.prompt_ids, SAMPLING, seed_of(response.request), 512, MODEL.context)
            | {"response_fields": REPLY_FIELDS}
        )
        for response in read_records(paths(folder).responses, Response)
    ]

    async def ask_all() -> None:
        left = iter(bodies)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask() -> None:
                for body in left:
                    headers = {"Content-Type": "application/json"}
                    async with session.post(f"{url}/completion", data=body, headers=headers) as reply:
                        assert json.loads(await reply.read())["tokens"]

            await asyncio.gather(*(ask() for _ in range(CONCURRENCY)))

    started = time.process_time()
    asyncio.run(ask_all())
    print(time.process_time() - started)


if __name__ == "__main__":
    mode, folder, url, prompts = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if mode == "eyas":
        write_records(paths(folder).prompts, map(prompt, range(prompts)))
    {"eyas": eyas, "minimal": minimal}[mode](folder, url)
