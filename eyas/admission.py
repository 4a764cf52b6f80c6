"""How many requests may be in flight at one server: enough that its queue is never empty, few enough that it is short.

A gate is what all clients of one server know together; these functions say how it moves. A server that tells its load is
followed closely; with one that does not, the gate opens while throughput grows. What a server says may be seconds old,
so the gate opens only once what was sent shows up there.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from eyas.plugins import Load

FIRST = 16  # requests before anything is known of the server
QUEUE_SHARE, QUEUE_LEAST = 0.1, 2  # of the running requests: the queue that is aimed at
STEP = 0.25  # share by which a gate opens without load reports, once it has been pushed back; until then it doubles
RETREAT = 0.8  # of what was in flight, after the server asked for less
RETRACTION_RETREAT = (
    0.95  # of what was in flight; a retraction is normal at the edge, so a small step back is enough
)
COOL_DOWN = 10.0  # s after a step back in which a gate does not open
SETTLE = 2.0  # s between two steps; load reports are about this old
CAUGHT_UP = 0.9  # share of what is in flight that a report must show before it is believed to be new
USED = 0.75  # share of a gate that must be in use for it to be what bounds: some replies are always just in
PATIENCE = 15.0  # s after which an old report is believed all the same
GAIN = 0.03  # throughput that a wider gate must bring, as a share, to stay wide; without load reports
REST = 600.0  # s before throughput is tried again, since lengths drift


class Gate(Struct, frozen=True, kw_only=True):
    """What the clients of one server know together.

    limit: requests that may be in flight. times are Unix time in s. retractions: as last told. eager: nothing has pushed
    back yet. load: as last told. long_since: since when every look has shown a long queue, 0 if the last one did not. window_*: the present measurement of throughput; rate: tokens/s of the one before, at rate_limit.
    """

    limit: int
    eager: bool = True
    changed: float = 0.0
    closed_until: float = 0.0
    looked: float = 0.0
    retractions: int | None = None
    load: Load | None = None
    long_since: float = 0.0
    window_since: float = 0.0
    window_tokens: int = 0
    window_replies: int = 0
    rate: float = 0.0
    rate_limit: int = 0


def new_gate(ceiling: int, now: float) -> Gate:
    return Gate(limit=min(FIRST, ceiling), changed=now, window_since=now)


def follow(gate: Gate, load: Load, outstanding: int, ceiling: int, now: float) -> Gate:
    """The gate after a look at the server. outstanding: what all clients have in flight there."""
    gate = msgspec.structs.replace(gate, looked=now, load=load)
    retracted = load.retractions is not None and load.retractions > (
        load.retractions if gate.retractions is None else gate.retractions
    )
    if load.retractions is not None:
        gate = msgspec.structs.replace(gate, retractions=load.retractions)
    if retracted and outstanding and now >= gate.closed_until:
        return _step_back(gate, RETRACTION_RETREAT * min(outstanding, load.running + load.waiting), now)
    wanted = max(QUEUE_LEAST, math.ceil(QUEUE_SHARE * load.running))
    long = load.waiting > 2 * wanted
    gate = msgspec.structs.replace(gate, long_since=(gate.long_since or now) if long else 0.0)
    seen = load.running + load.waiting
    if seen < CAUGHT_UP * outstanding and now - gate.changed < PATIENCE:
        return gate  # older than what was sent since
    if now - gate.changed < SETTLE:
        return gate
    if load.running == 0 and load.waiting and now - gate.changed < PATIENCE:
        return gate  # the first prompts are still being read
    if long:
        if now - gate.long_since < SETTLE:
            return gate  # what has just come in is no queue yet, however little runs at that moment
        limit = max(load.running + wanted, 1)
        return _moved(gate, limit, now, eager=False) if limit < gate.limit else gate
    if load.waiting >= wanted or outstanding < USED * gate.limit or now < gate.closed_until:
        return gate
    return _wider(gate, gate.limit if gate.eager else wanted - load.waiting, ceiling, now)


def pushed_back(gate: Gate, outstanding: int, now: float) -> Gate:
    """The gate after the server has asked for less (429, or 503 with a full queue); one step for all that come at once.

    While the server tells an empty queue it is not full, whoever refused a request on the way: then the gate only opens no
    further for a moment, and the request's own pause is enough. Nor does it close below what the server tells that it runs.
    """
    floor = 0
    if gate.load is not None and now - gate.looked < PATIENCE:
        if gate.load.waiting == 0:
            return msgspec.structs.replace(gate, closed_until=max(gate.closed_until, now + SETTLE))
        floor = gate.load.running
    if now < gate.changed + SETTLE and not gate.eager:
        return gate
    return _step_back(gate, max(floor, RETREAT * min(outstanding, gate.limit)), now)


def replied(gate: Gate, replies: int, tokens: int, outstanding: int, ceiling: int, now: float) -> Gate:
    """The gate of a server that tells no load, after `replies` with `tokens` output tokens came since the last call.

    A window lasts until twice as many replies have come as may be in flight: fewer would be those of another gate.
    """
    gate = msgspec.structs.replace(
        gate,
        window_tokens=gate.window_tokens + tokens,
        window_replies=gate.window_replies + replies,
        looked=now,
    )
    if gate.window_replies < 2 * gate.limit or now <= gate.window_since:
        return gate
    rate = gate.window_tokens / (now - gate.window_since)
    full = outstanding >= USED * gate.limit
    fresh = msgspec.structs.replace(gate, window_since=now, window_tokens=0, window_replies=0)
    if now < gate.closed_until or not full:
        return fresh
    if gate.rate_limit and gate.rate_limit < gate.limit and rate < gate.rate * (1 + GAIN):
        # Wider brought nothing: back to where it was, and rest.
        back = _moved(fresh, gate.rate_limit, now, eager=False)
        return msgspec.structs.replace(back, closed_until=now + REST, rate_limit=0)
    step = gate.limit if gate.eager else max(1, int(gate.limit * STEP))
    return msgspec.structs.replace(_wider(fresh, step, ceiling, now), rate=rate, rate_limit=gate.limit)


def _wider(gate: Gate, step: int, ceiling: int, now: float) -> Gate:
    limit = min(ceiling, gate.limit + step)
    return _moved(gate, limit, now, eager=gate.eager) if limit > gate.limit else gate


def _step_back(gate: Gate, limit: float, now: float) -> Gate:
    back = _moved(gate, max(1, int(min(limit, gate.limit))), now, eager=False)
    return msgspec.structs.replace(back, closed_until=now + COOL_DOWN)


def _moved(gate: Gate, limit: int, now: float, *, eager: bool) -> Gate:
    return msgspec.structs.replace(
        gate, limit=limit, eager=eager, changed=now, window_since=now, window_tokens=0, window_replies=0
    )
