"""Prompts of software-agent trajectories: nebius/SWE-agent-trajectories (README of commit 68195a1),
SWE-bench/SWE-smith-trajectories (tree 08e109b) and SWE-Gym/OpenHands-Sampled-Trajectories."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import decoded, messages, tools


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
            found = messages(decoded(row["messages"], "messages"), "messages", "role", "content")
        else:
            raise ValueError(
                "there is neither a column 'trajectory' (nebius) nor 'messages' (SWE-smith, SWE-Gym)"
            )
        if isinstance(found, Skip):
            return found
        return Conversation(found, tools(row, "tools"))


@hookimpl
def register_sources(register: Register) -> None:
    register(SweTrajectories)
