"""The `eyas` command: its errors are one line, its display tells the truth, and it starts fast."""

import io
import os
import re
import socket
import subprocess
import sys
import time

import pytest
from helpers import prompt

import eyas.cli
from eyas.cli import status
from eyas.errors import EyasError
from eyas.plugins import registry
from eyas.progress import Progress, write_progress
from eyas.recordfile import write_records
from eyas.schema import PAGE, plugin_keys, purpose

NOW = 1_700_000_000.0


def progress(dataset="A", **fields):
    values = {
        "state": "generating",
        "planned": 1000,
        "done": 400,
        "tokens": 123_456,
        "rate": 88.8,
        "in_flight": 6,
        "eta": (500.0, 600.0, 900.0),
        "updated": NOW,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    return Progress(dataset=dataset, **(values | fields))


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs" / "generate"


def put(logs, *all_of):
    for one in all_of:
        write_progress(logs / f"{one.dataset}.status.json", one)


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


class Terminal(io.StringIO):
    """Where one can redraw."""

    def isatty(self):
        return True


class Clock:
    """Time that passes only when someone sleeps; `at` says what happens at which second."""

    def __init__(self, at):
        self.now, self.at = NOW, at

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < NOW + 100, "follow does not end"
        self.at.get(round(self.now - NOW), lambda: None)()


# --- main --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"), [(EyasError("no such thing; do this"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_are_one_line_and_have_a_status(monkeypatch, capsys, error, code):
    def fail(*_):
        raise error

    monkeypatch.setattr(status, "look", fail)
    assert eyas.cli.main(["status"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("eyas: error: no such thing; do this\n" if code == 1 else "")


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """A pipe whose reader has gone; the output is far larger than its buffer."""
    put(tmp_path / "logs", *(progress(f"dataset_{n:04}") for n in range(2000)))
    command = f'"{sys.executable}" -c "import eyas.cli; raise SystemExit(eyas.cli.main())" status --logs logs | head -1'
    shell = ["bash", "-c", f"set -o pipefail; {command}"]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("dataset")


def test_starting_loads_nothing_heavy():
    code = "import sys, eyas.cli; eyas.cli.parser(); print({'pandas', 'pyarrow', 'numpy', 'aiohttp'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_every_subcommand_says_what_it_does(capsys):
    with pytest.raises(SystemExit):
        eyas.cli.main(["--help"])
    text = capsys.readouterr().out
    assert re.search(r"^ +status +\S", text, re.M)
    assert re.search(r"^ +plugins +\S", text, re.M)


# --- status ------------------------------------------------------------------------------------------------------


def test_a_row_says_how_far_a_dataset_is(logs):
    put(logs, progress(accepted=390))
    head, row = status.table(status.look(logs, NOW))
    assert head.split() == [
        "dataset",
        "state",
        "done/planned",
        "accepted",
        "tokens",
        "tok/s",
        "in",
        "flight",
        "to",
        "go",
    ]
    assert row.split() == [
        "A",
        "generating",
        "400/1,000",
        "390",
        "123,456",
        "88.8",
        "6",
        "10",
        "min",
        "(8–15)",
    ]


def test_columns_line_up_and_add_up(logs):
    put(
        logs,
        progress(),
        progress("a_longer_name", state="done", done=1000, tokens=1_000_000, in_flight=0, rate=0),
    )
    lines = status.table(status.look(logs, NOW))
    assert [line.split()[0] for line in lines] == ["dataset", "A", "a_longer_name", "total"]
    assert len({line.index("/1,000") for line in lines[1:3]}) == 1
    assert "1,400/2,000" in lines[3]
    assert "1,123,456" in lines[3]
    assert "88.8" in lines[3]


def test_what_the_server_does_not_tell_has_no_column(logs):
    put(logs, progress())
    assert "queued" not in status.table(status.look(logs, NOW))[0]
    put(logs, progress(queued=3, kv_use=0.87))
    head, row = status.table(status.look(logs, NOW))
    assert head.split()[-4:] == ["queued", "KV", "to", "go"]
    assert row.split()[6:8] == ["3", "87%"]


def test_a_dead_or_silent_job_is_stopped(logs):
    put(
        logs,
        progress("alive"),
        progress("dead", pid=ended_process()),
        progress("elsewhere", pid=ended_process(), host="another-node"),
        progress("silent", host="another-node", updated=NOW - 31),
        progress("finished", state="done", pid=ended_process(), updated=NOW - 9999),
    )
    states = {one.dataset: shown for one, shown in status.look(logs, NOW)}
    assert states == {
        "alive": "generating",
        "dead": "stopped",
        "elsewhere": "generating",
        "silent": "stopped",
        "finished": "done",
    }


def test_a_job_that_ends_while_one_looks_is_not_stopped(logs, monkeypatch):
    """Its last word is written after its file was read and before its process was looked for."""
    put(logs, progress())

    def ends(_pid):
        put(logs, progress(state="done", done=1000))
        return False

    monkeypatch.setattr(status, "is_alive", ends)
    ((seen, shown),) = status.look(logs, NOW)
    assert (seen.done, shown) == (1000, "done")


def test_a_job_that_begins_while_one_looks_is_not_stopped(logs, monkeypatch):
    """The file of a job that was killed is replaced by the next one's."""
    put(logs, progress(pid=1))

    def begins(pid):
        put(logs, progress(done=401))
        return pid == os.getpid()

    monkeypatch.setattr(status, "is_alive", begins)
    ((seen, shown),) = status.look(logs, NOW)
    assert (seen.done, shown) == (401, "generating")


def test_a_dataset_whose_turn_has_not_come_is_pending_while_its_run_lives(logs):
    """Nobody rewrites its file meanwhile, so it does not grow stale."""
    put(
        logs,
        progress("here", state="pending", updated=NOW - 9999),
        progress("elsewhere", state="pending", updated=NOW - 9999, host="another-node"),
        progress("ended", state="pending", pid=ended_process()),
    )
    states = {one.dataset: shown for one, shown in status.look(logs, NOW)}
    assert states == {"here": "pending", "elsewhere": "pending", "ended": "stopped"}


def pending(dataset, planned):
    return progress(
        dataset, state="pending", planned=planned, done=0, tokens=0, rate=0, in_flight=0, eta=None
    )


def test_the_total_counts_datasets_whose_turn_has_not_come(logs):
    put(logs, progress(), pending("B", 600))
    _, _, waiting, total = status.table(status.look(logs, NOW))
    assert waiting.split() == ["B", "pending", "0/600", "0", "–", "–", "–"]
    assert total.split()[:2] == ["total", "400/1,600"]


def test_a_plan_that_is_not_known_yet_is_not_taken_for_nothing(logs):
    put(logs, progress(), pending("B", 0))
    _, _, waiting, total = status.table(status.look(logs, NOW))
    assert waiting.split()[:3] == ["B", "pending", "0/?"]
    assert total.split()[:2] == ["total", "400/1,000+"]


def test_the_prompts_tell_how_much_is_planned_before_they_are_asked(tmp_path, logs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(logs, progress("A", state="pending", planned=0, samples=3, done=0), pending("B", 600))
    write_records("results/A/prompts.jsonl.zst", [prompt("k1"), prompt("k2")])
    write_records("results/B/prompts.jsonl.zst", [prompt("k1")])
    assert [one.planned for one, _ in status.look(logs, NOW)] == [6, 600]


def test_all_is_done_when_the_slowest_is(logs):
    put(logs, progress(), progress("B", eta=(60.0, 1800.0, 3000.0)), progress("C", state="done", eta=None))
    assert status.table(status.look(logs, NOW))[-1].endswith("30 min (8–50)")
    put(logs, progress("C", state="waiting", eta=None))
    assert status.table(status.look(logs, NOW))[-1].endswith("–"), "unknown while one of them is"


def test_a_process_that_nobody_waited_for_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 10
    while status.is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not status.is_alive(process.pid)
    process.wait()
    assert status.is_alive(os.getpid())


@pytest.mark.parametrize(
    ("eta", "text"),
    [
        (None, ""),
        ((5, 9, 20), "9 s (5–20)"),
        ((3000, 3500, 4200), "58 min (50–70)"),
        ((7200, 9000, 18000), "2.5 h (2.0–5.0)"),
    ],
)
def test_time_to_go_has_one_unit(eta, text):
    assert status.remaining(eta) == text


def test_messages_stand_below_the_table(logs):
    put(logs, progress(state="failed", message="the server does not answer"))
    assert status.table(status.look(logs, NOW))[-1] == "A: the server does not answer"


@pytest.mark.parametrize(
    "ended", [{"state": "interrupted"}, {"pid": ended_process()}], ids=["Ctrl-C", "killed"]
)
def test_an_interrupted_run_is_said_to_go_on(logs, ended):
    put(logs, progress(state="failed", message="the server does not answer"), progress("B", **ended))
    lines = status.table(status.look(logs, NOW))
    assert lines[2].split()[:2] == ["B", ended.get("state", "stopped")]
    assert "run the same command again, and it goes on" in lines[-1]
    put(logs, progress("B"))
    assert not any("goes on" in line for line in status.table(status.look(logs, NOW)))


def test_tokens_without_those_of_an_earlier_run_are_marked(logs):
    put(logs, progress(journalled=300), progress("B", state="done", journalled=300))
    rows = [line.split() for line in status.table(status.look(logs, NOW))[1:]]
    assert [row[3] for row in rows[:2]] == ["+123,456", "123,456"] and rows[2][2] == "+246,912"


def test_a_message_is_one_line_and_cannot_draw_on_the_terminal(logs):
    put(logs, progress(state="failed", message="the server said:\n\x1b[2Jgone\n"))
    assert status.table(status.look(logs, NOW))[-1] == "A: the server said: ␛[2Jgone"


def test_a_damaged_status_file_is_named(logs):
    put(logs, progress())
    (logs / "B.status.json").write_text("{")
    with pytest.raises(EyasError, match=r"B\.status\.json: not a status file .* delete it"):
        status.look(logs, NOW)


def test_pilots_are_shown_while_they_run_and_until_something_is_generated(
    tmp_path, logs, monkeypatch, capsys
):
    def heads(*arguments):
        eyas.cli.main(["status", *arguments])
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    monkeypatch.chdir(tmp_path)
    pilots = tmp_path / "logs" / "pilot"
    put(pilots, progress("P", state="done"))
    assert heads() == ["pilot", "P"]
    put(logs, progress("G", state="done"))
    assert heads() == ["dataset", "G"]
    put(pilots, progress("P", updated=time.time()))
    assert heads() == ["pilot", "P"]
    assert heads("--logs", "logs/generate") == ["dataset", "G"]
    put(logs, progress("G", updated=time.time()))
    assert heads() == ["dataset", "G"]


def test_following_ends_with_the_pilots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pilots = tmp_path / "logs" / "pilot"
    put(pilots, progress("P"))
    clock = Clock({3: lambda: put(pilots, progress("P", state="done"))})
    out = io.StringIO()
    status.follow(None, None, out, clock, clock.sleep)
    assert clock.now == NOW + 3 and out.getvalue().startswith("pilot of")


@pytest.mark.parametrize("content", [b"", b"# Summary\n\n\xff\n"])
def test_a_damaged_summary_is_told_with_the_remedy(tmp_path, monkeypatch, capsys, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "summary").mkdir(parents=True)
    (tmp_path / "results" / "summary" / "summary.md").write_bytes(content)
    assert eyas.cli.main(["status"]) == 1
    assert "results/summary/summary.md: damaged; delete it and run" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"sources": 5}', b"\xff"])
def test_a_damaged_manifest_is_told_with_the_remedy(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(EyasError, match=r"manifest\.json: damaged; delete it and run"):
        eyas.cli.verify._check_run(tmp_path / "manifest.json", {"a"})


def test_a_run_elsewhere_is_shown_by_its_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "run" / "logs" / "generate", progress("G", state="done"))
    (tmp_path / "here").mkdir()
    put(tmp_path / "here", progress("H", state="done"))
    assert eyas.cli.main(["status", "--directory", "run"]) == 0
    assert "\nG " in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    eyas.cli.main(["status", "--directory", "run", "--logs", "here"])
    assert "\nH " in capsys.readouterr().out, "other paths are the caller's"
    monkeypatch.chdir(tmp_path)
    assert eyas.cli.main(["status", "--directory", "none"]) == 1
    assert "--directory: none cannot be entered (No such file or directory)" in capsys.readouterr().err
    (tmp_path / "a-file").touch()
    for command in ("status", "doctor"):
        assert eyas.cli.main([command, "--directory", "a-file"]) == 1
        assert "--directory: a-file cannot be entered (" in capsys.readouterr().err


def test_nothing_yet_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert eyas.cli.main(["status"]) == 0
    assert capsys.readouterr().out == "No generation has started here yet.\n"


def test_a_finished_run_shows_its_summary_and_a_running_one_itself(tmp_path, logs, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status.SUMMARY.parent.mkdir(parents=True)
    status.SUMMARY.write_text(
        "# Summary\n\n| dataset | n |\n| ------- | -: |\n| A | 1 |\n\n- text\n\n| b |\n"
    )
    put(logs, progress(state="done"))
    eyas.cli.main(["status"])
    assert capsys.readouterr().out == "| dataset | n |\n| ------- | -: |\n| A | 1 |\n"
    for ended in ({"updated": time.time()}, {"state": "interrupted"}, {"state": "failed"}):
        put(logs, progress(**ended))
        eyas.cli.main(["status"])
        assert capsys.readouterr().out.startswith("dataset  state")


def test_a_finished_run_shows_its_warnings_before_its_table(tmp_path, logs, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status.SUMMARY.parent.mkdir(parents=True)
    top = "> Warning: A: no prompt was answered.\n\n> Warning: B.\n\n| dataset | n |\n| ------- | -: |\n"
    status.SUMMARY.write_text(f"# Summary\n\n{top}\n- text\n\n| b |\n")
    eyas.cli.main(["status"])
    assert capsys.readouterr().out == top


# --- follow ------------------------------------------------------------------------------------------------------


def test_following_ends_when_all_datasets_have(logs):
    put(logs, progress(), progress("B", state="failed"))
    out, clock = io.StringIO(), Clock({3: lambda: put(logs, progress(state="done", done=1000))})
    status.follow(logs, None, out, clock, clock.sleep)
    assert clock.now == NOW + 3
    assert "1,000/1,000" in out.getvalue().split("\n\n")[-1]


def test_following_ends_when_the_run_has_and_left_some_undone(logs):
    """A failed prompts stage leaves its dataset pending for ever."""
    put(logs, progress(), pending("B", 10))
    last = [progress(state="done", done=1000), progress("B", state="pending", pid=ended_process())]
    out, clock = io.StringIO(), Clock({3: lambda: put(logs, *last)})
    status.follow(logs, None, out, clock, clock.sleep)
    assert clock.now == NOW + 3 and "stopped" in out.getvalue()


def test_following_a_process_outlives_the_datasets_that_exist(logs):
    """With --pid, other datasets may yet begin: all being done ends nothing."""
    put(logs, progress(state="done"))
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    def end():
        process.communicate()

    out, clock = io.StringIO(), Clock({2: lambda: put(logs, progress("B")), 4: end})
    status.follow(logs, process.pid, out, clock, clock.sleep)
    assert clock.now == NOW + 4
    assert "B" in out.getvalue()


def test_without_a_terminal_only_news_are_printed(logs):
    put(logs, progress(done=0, eta=None), pending("B", 600))
    changes = {second: lambda n=second: put(logs, progress(done=n, eta=None)) for second in range(1, 15)}
    slow = [f"{rate} tokens/s, the plan has 90" for rate in (40, 41)]
    changes |= {
        15: lambda: put(logs, progress("B", state="waiting", done=0)),
        16: lambda: put(logs, progress("B", done=1, alarms=slow[:1])),
        17: lambda: put(logs, progress("B", done=2, alarms=slow[1:], gpus=[(0.5, 0.5)])),
        20: lambda: put(logs, progress(state="done", done=1000)),
        28: lambda: put(logs, progress("B", state="done", done=600)),
    }
    out, clock = io.StringIO(), Clock(changes)
    status.follow(logs, None, out, clock, clock.sleep)
    first, last = out.getvalue().split("\n\n")
    head, a, b, total, *news = first.splitlines()
    assert (head.split()[0], a.split()[2], b.split()[1], total.split()[0]) == (
        "dataset",
        "0/1,000",
        "pending",
        "total",
    )
    assert [line.split()[:2] for line in news] == [["B", "waiting"], ["ALARM", "B:"], ["A", "done"]]
    assert [line.split()[:2] for line in last.splitlines()[1:3]] == [["A", "done"], ["B", "done"]]
    assert "\x1b" not in out.getvalue()


def test_without_a_terminal_a_long_run_shows_its_table_now_and_then(logs, monkeypatch):
    monkeypatch.setattr(status, "QUIET", 10.0)
    put(logs, progress(done=0, eta=None))
    changes = {second: lambda n=second: put(logs, progress(done=n, eta=None)) for second in range(1, 15)}
    out, clock = io.StringIO(), Clock(changes | {28: lambda: put(logs, progress(state="done", done=28))})
    status.follow(logs, None, out, clock, clock.sleep)
    blocks = out.getvalue().split("\n\n")
    assert [re.search(r"(\d+)/1,000", block)[1] for block in blocks] == ["0", "10", "14", "28"]


def test_a_terminal_is_redrawn_in_place(logs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "24")
    put(logs, progress(), progress("B"))
    done = [progress(state="done"), progress("B", state="done")]
    out, clock = Terminal(), Clock({1: lambda: put(logs, *done)})
    status.follow(logs, None, out, clock, clock.sleep)
    first, second = out.getvalue().split("\x1b[4A")
    assert first.count("\n") == second.count("\n") == 4
    assert all(len(re.sub(r"\x1b\[\w|\r", "", line)) < 40 for line in out.getvalue().splitlines())


# --- plugins -----------------------------------------------------------------------------------------------------

PLUGIN = '''
from typing import Annotated
from msgspec import Meta, Struct
from eyas import hookimpl
from eyas.plugins import Check

class Options(Struct, frozen=True, forbid_unknown_fields=True):
    limit: int
    words: list[str] = []
    share: Annotated[float, Meta(gt=0, le=1, description="Of all letters, how many may be capitals.")] = 0.5

class Shouting(Check):
    """Finds answers in capitals.

    More about it.
    """
    name = "shouting"
    Options = Options

    def faults(self, response, split):
        return ()

@hookimpl
def register_checks(register):
    register(Shouting)
'''


def test_plugins_are_listed_with_purpose_origin_and_options(tmp_path, capsys):
    path = tmp_path / "shouting.py"
    path.write_text(PLUGIN)
    assert eyas.cli.main(["plugins", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        f"check shouting  ({path})\n    Finds answers in capitals.\n"
        "    policy: reject, mark or off, default reject\n"
        "        What a fault does: reject the row, mark it, or nothing.\n"
        "    limit: integer, required\n"
        "    words: list of string, default []\n"
        "    share: number > 0 ≤ 1, default 0.5\n"
        "        Of all letters, how many may be capitals.\n"
    ) in text
    assert "source glaive  (built-in)\n" in text
    assert (
        "# What makes a response acceptable." in text
        and "# In the config: datasets.<name>.checks.<check>\n" in text
    )


def test_plugins_of_a_config_are_listed_with_their_place(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shouting.py").write_text(PLUGIN)
    (tmp_path / "mine.yaml").write_text(
        "model: {id: x}\nserver: {engine: {name: llamacpp, model_file: x}}\n"
        "datasets: {d: {source: {name: glaive}, files: [x], checks: {shouting: {limit: 1}}}}\n"
        "plugins: [shouting.py]\n"
    )
    assert eyas.cli.main(["plugins", "--configfile", "mine.yaml"]) == 0
    assert "check shouting  (shouting.py)\n" in capsys.readouterr().out


def test_every_built_in_says_what_it_is_for_and_what_each_option_means():
    for found in registry().all():
        assert purpose(found.cls), found.cls.name
        for key in plugin_keys(found):
            assert key.meaning.endswith("."), (found.cls.name, key.name)


def test_plugins_and_the_page_of_the_config_say_the_same(capsys):
    eyas.cli.main(["plugins"])
    listed = capsys.readouterr().out
    told = PAGE.read_text().partition("## Source plugins")[2]
    rows = re.findall(r"^\| `(\w+)` \| .* \| (?:`(.*)`|(required)) \| (.*) \|$", told, re.M)
    assert len(rows) > 20
    for name, default, required, meaning in rows:
        entry = f"{required or f'default {default}'}\n        {meaning}"
        assert re.search(rf"^    {name}: .*, {re.escape(entry)}$", listed, re.M), name


def test_a_missing_plugin_file_is_named(capsys):
    assert eyas.cli.main(["plugins", "nowhere.py"]) == 1
    assert capsys.readouterr().err.startswith("eyas: error: nowhere.py does not exist")
