"""Judges one response: splits off its reasoning and applies the checks with their policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from eyas.errors import EyasError
from eyas.plugins import Check, Reasoning, Registry, Split
from eyas.records import Response, Verdict, unit_id


class Judge:
    """The reasoning format and the checks of one dataset, ready to judge.

    reasoning: `name` and options of the format, as in ValidateSettings. checks: per check `policy` and options; a
    check that is not named is not run.
    """

    def __init__(
        self, reasoning: Mapping[str, Any], checks: Mapping[str, Mapping[str, Any]], registry: Registry
    ) -> None:
        name = reasoning["name"]
        found = registry.find("reasoning", name, "model.reasoning")
        options = registry.options("reasoning", name, _without(reasoning, "name"), "model.reasoning")
        self.reasoning = cast(Reasoning, found.cls(options))
        self._checks: list[tuple[str, bool, Check]] = []
        for check, section in checks.items():
            if section["policy"] == "off":
                continue
            found = registry.find("check", check, f"checks.{check}")
            options = registry.options("check", check, _without(section, "policy"), f"checks.{check}")
            self._checks.append((check, section["policy"] == "reject", cast(Check, found.cls(options))))

    def judge(self, response: Response) -> Verdict:
        """The verdict on `response`. Raises EyasError, naming plugin and response, if a plugin fails on it."""
        split = self._split(response)
        reasons: list[str] = []
        marks: list[str] = []
        for name, rejects, check in self._checks:
            try:
                (reasons if rejects else marks).extend(check.faults(response, split))
            except Exception as error:
                raise EyasError(_failed("check", name, response, error)) from error
        return Verdict(
            key=response.key,
            turn=response.turn,
            sample=response.sample,
            accepted=not reasons,
            reasons=reasons,
            marks=marks,
            truncated=response.finish.type == "length",
            constrained=response.constrained,
            reasoning_state=split.state,
            prompt_tokens=len(response.prompt_ids),
            reasoning_tokens=split.reasoning_tokens,
            answer_tokens=len(response.output_ids) - split.reasoning_tokens,
            output_tokens=len(response.output_ids),
        )

    def _split(self, response: Response) -> Split:
        total = len(response.output_ids)
        if len(response.text_lengths) != total:
            raise EyasError(
                f"{_name(response)}: {len(response.text_lengths)} text_lengths for {total} output_ids; the engine plugin must give one each"
            )
        try:
            split = self.reasoning.split(response)
        except Exception as error:
            raise EyasError(_failed("reasoning format", self.reasoning.name, response, error)) from error
        if not 0 <= split.reasoning_tokens <= total:
            raise EyasError(
                f"{_name(response)}: reasoning format {self.reasoning.name!r} counts {split.reasoning_tokens} of {total} tokens; correct the plugin"
            )
        return split


def _without(section: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name != key}


def _name(response: Response) -> str:
    return f"response {unit_id(response.key, response.turn, response.sample)}"


def _failed(kind: str, name: str, response: Response, error: Exception) -> str:
    return f"{_name(response)}: {kind} {name!r} failed: {type(error).__name__}: {error}; correct the plugin or turn it off"
