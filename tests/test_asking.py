"""Parts of asking that a whole run would show only by its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import eyas.asking
from eyas.asking import Asking, prepare
from eyas.config import ModelConfig
from eyas.errors import EyasError
from eyas.lengths import places


def test_added_tokens_are_found_in_prompt_and_answer_and_nothing_else_is() -> None:
    asking: Any = object.__new__(Asking)
    asking.added = {3: "<a>", 7: "<b>", 9: "<c>"}
    asking.own = frozenset(asking.added)
    asking.is_own = np.zeros(11, bool)
    asking.is_own[[3, 7, 9]] = True
    assert asking._added_in([3, 4], places([5, 9, 9, 200_000])) == {"<a>": 3, "<c>": 9}
    assert asking._added_in([4], places([10, 11, 200_000])) == {}
    assert asking._added_in([4], places([7])) == {"<b>": 7}


@pytest.mark.parametrize("lengths", [[1, 2], "1", None])
def test_a_tokenizer_whose_lengths_no_journal_could_hold_is_refused_before_anything_is_asked(
    lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: ("ab", lengths))
    engine: Any = SimpleNamespace(name="theirs", tokenizer=lambda url, key: tokenizer)
    monkeypatch.setattr(eyas.asking, "Renderer", lambda *_: SimpleNamespace(render=lambda _: [1, 2]))
    lease: Any = SimpleNamespace(urls=["http://x"], key=None)
    reasoning: Any = SimpleNamespace(prefill="", self_test=lambda *_: pytest.fail("went on"))
    with pytest.raises(
        EyasError, match=r"^engine 'theirs': its tokenizer's decode must give .* correct the plugin$"
    ):
        prepare(engine, lease, ModelConfig(id="m"), reasoning)
