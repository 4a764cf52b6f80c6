"""Whether the stop id stands where the finish reason says."""

from __future__ import annotations

from collections.abc import Iterable

from eyas.plugins import Check, Register, Split, hookimpl
from eyas.records import Response

EARLY = "stop id before the end"


class StopToken(Check):
    """Finds answers whose stop id is not exactly once and last, or that hold one although they were cut.

    A drafter learns from such rows to go on after the end, or never to end.
    """

    name = "stop_token"

    def faults(self, response: Response, split: Split) -> Iterable[str]:
        ids, finish = response.output_ids, response.finish
        stops = set(response.stop_ids)
        if finish.type == "stop" and not isinstance(finish.matched, str):
            if not ids or ids[-1] != finish.matched:
                yield "stop id missing at the end"
            else:
                stops.add(finish.matched)
        elif ids and ids[-1] in stops:
            yield "stop id that did not end the answer"
            if not stops.isdisjoint(ids[:-1]):
                yield EARLY
            return
        if response.holds(stops):
            yield EARLY


@hookimpl
def register_checks(register: Register) -> None:
    register(StopToken)
