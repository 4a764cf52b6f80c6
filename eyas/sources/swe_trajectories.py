"""Prompts of software-agent trajectories: nebius/SWE-agent-trajectories (README of commit 68195a1),
SWE-bench/SWE-smith-trajectories (tree 08e109b) and SWE-Gym/OpenHands-Sampled-Trajectories."""

from __future__ import annotations

import json
from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.chat import messages, without_nulls


class SweTrajectories(Source):
    """Openings of software-agent trajectories: the agent's instructions and the issue to solve.

    No set has a unique id: `instance_id` names the issue, `traj_id` repeats.
    """

    name = "swe_trajectories"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        if "trajectory" in row:
            # nebius leaves `text` null in system turns and puts it into `system_prompt`.
            found = messages(row["trajectory"], "trajectory", "role", "text", "system_prompt")
        elif "messages" in row:
            found = messages(_decoded(row["messages"]), "messages", "role", "content")
        else:
            raise ValueError(
                "there is neither a column 'trajectory' (nebius) nor 'messages' (SWE-smith, SWE-Gym)"
            )
        if isinstance(found, Skip):
            return found
        tools = without_nulls(row.get("tools")) or []
        if not isinstance(tools, list):
            raise TypeError(f"column 'tools' holds {type(tools).__name__}, not a list of tools")
        return Conversation(found, tools)


def _decoded(turns: Any) -> Any:
    """SWE-smith stores its messages as JSON in a string."""
    if not isinstance(turns, str):
        return turns
    try:
        return json.loads(turns)
    except ValueError as error:
        raise ValueError(f"column 'messages' is text but not JSON ({error})") from None


@hookimpl
def register_sources(register: Register) -> None:
    register(SweTrajectories)
