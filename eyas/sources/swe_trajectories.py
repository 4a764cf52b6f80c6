"""Prompts of software-agent trajectories: nebius/SWE-agent-trajectories (README of commit 68195a1),
SWE-bench/SWE-smith-trajectories (tree 08e109b) and SWE-Gym/OpenHands-Sampled-Trajectories."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.records import Message
from eyas.sources.turns import decoded, messages, tools


class SweTrajectories(Source):
    """Software-agent trajectories: the agent's instructions and the issue to solve, then answers and what their calls gave.

    Where calls are plain text (nebius, SWE-smith `xml` and `ticks`), what follows an answer is what its commands printed:
    the result of a call that nobody can compare, so a conversation ends at its first answer.
    No set has a unique id: `instance_id` names the issue, `traj_id` repeats.
    """

    name = "swe_trajectories"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        if "trajectory" in row:
            # nebius leaves `text` null in system turns and puts it into `system_prompt`.
            found = messages(row["trajectory"], "trajectory", "role", "text", "system_prompt")
        elif "messages" in row:
            found = messages(decoded(row["messages"], "messages"), "messages", "role", "content")
        else:
            raise ValueError(
                "there is neither a column 'trajectory' (nebius) nor 'messages' (SWE-smith, SWE-Gym)"
            )
        if isinstance(found, Skip):
            return found
        if not any(message.tool_calls for message in found):
            found = _with_results(found)
        return Conversation(found, tools(row, "tools"))


def _with_results(turns: list[Message]) -> list[Message]:
    """The turns, what the user says behind the first answer as results of tools."""
    first = next((at for at, turn in enumerate(turns) if turn.role == "assistant"), len(turns))
    return turns[:first] + [
        replace(turn, role="tool") if turn.role == "user" else turn for turn in turns[first:]
    ]


@hookimpl
def register_sources(register: Register) -> None:
    register(SweTrajectories)
