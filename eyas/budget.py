"""Which units a token budget takes: the shortest finished prefix of the fixed order that reaches it.

A unit is a whole key: all its turns and samples. Membership depends on the order and the answers alone, so neither timing nor luck
decides it, and long answers are as likely to be in as short ones.
"""

from __future__ import annotations


class Budget:
    """Follows units through submission and completion, in accepted output tokens.

    limit: the budget in tokens, or None for no budget. guess: expected tokens of an answer before any unit has finished.
    """

    def __init__(self, limit: int | None, guess: float) -> None:
        self.limit = limit
        self._guess = guess
        self._submitted = 0  # units 0 … submitted - 1 are submitted
        self._in_flight: dict[int, int] = {}  # submitted and not finished, with the answers planned for them
        self._answers = 0  # their sum
        self._finished: dict[int, int] = {}  # beyond the prefix
        self._beyond = 0  # their tokens
        self.prefix = 0  # units 0 … prefix - 1 are finished
        self.prefix_tokens = 0
        self._total = self._count = 0
        self.reached = False

    def submit(self, index: int, answers: int = 1) -> None:
        """Unit `index`, the next in order, is on its way, with `answers` planned for it."""
        assert index == self._submitted, "units are submitted in order"
        self._submitted += 1
        self._in_flight[index] = answers
        self._answers += answers

    def finish(self, index: int, tokens: int) -> None:
        """Unit `index` is complete with `tokens` accepted output tokens."""
        answers = self._in_flight.pop(index)
        self._answers -= answers
        self._finished[index] = tokens
        self._beyond += tokens
        self._total += tokens
        self._count += answers
        while not self.reached and self.prefix in self._finished:
            step = self._finished.pop(self.prefix)
            self._beyond -= step
            self.prefix_tokens += step
            self.prefix += 1
            self.reached = self.limit is not None and self.prefix_tokens >= self.limit

    def wants_more(self) -> bool:
        """Whether the next unit should be submitted: each answer planned for what is in flight counts at the running mean."""
        if self.limit is None:
            return True
        if self.reached:
            return False
        mean = self._total / self._count if self._count else self._guess
        return self.prefix_tokens + self._beyond + self._answers * mean < self.limit

    def answers_left(self) -> float | None:
        """How many answers the budget still needs at the running mean; None without a budget, or before it is known."""
        if self.limit is None or not self._total:
            return None
        return max(self.limit - self.prefix_tokens - self._beyond, 0) * self._count / self._total
