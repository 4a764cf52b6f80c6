"""The package's own test: what it brings is found, and does what it says. Needs the package installed."""

from types import SimpleNamespace

import pytest

from eyas.plugins import Conversation, Skip, registry


@pytest.fixture(scope="module")
def found():
    return registry()


def test_everything_is_found_with_its_package(found):
    mine = {(one.kind, one.cls.name) for one in found.all() if one.origin == "eyas-plugin-hello 0.1.0"}
    assert mine == {("source", "hello"), ("check", "excited"), ("exporter", "lengths"), ("rules", "hello")}


def test_a_row_becomes_a_greeting(found):
    source = found.create("source", "hello", {}, "source")
    made = source.parse({"name": "Ada"})
    assert isinstance(made, Conversation) and "Ada" in made.messages[0].content
    assert source.parse({"name": ""}) == Skip("nobody to greet")


def test_excited_answers_are_found(found):
    check = found.create("check", "excited", {"most": 1}, "check")
    assert list(check.faults(SimpleNamespace(text="Hi!!"), None)) == ["too many exclamation marks"]
    assert list(check.faults(SimpleNamespace(text="Hi!"), None)) == []


def test_lengths_are_written(found, tmp_path):
    row = SimpleNamespace(id="d/k:0:0", input_ids=[1, 2, 3], loss_mask=[0, 1, 1])
    exporter = found.create("exporter", "lengths", {}, "exporter")
    assert exporter.write([row], tmp_path / "out.csv") == 1
    assert (tmp_path / "out.csv").read_text() == "id,tokens,supervised\nd/k:0:0,3,2\n"
