"""What a failed run tells: one line a job, this run's jobs only, and the command that goes on."""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyas.errors import EyasError
from eyas.failures import SILENT, command, failed_jobs, log_versions, report_failures
from eyas.program import explain
from eyas.terminal import HANDLER, Brief, leave_ctrl_c_to_serve, shorten

ARGV = ["/opt/venv/lib/snakemake/__main__.py", "--cores", "2", "--directory", "my run"]


def log(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"2026-11-30 04:39:25,123 {line}\n" for line in lines))
    return path


# --- the report --------------------------------------------------------------------------------------------------


def test_only_jobs_that_failed_in_this_run_are_named(tmp_path: Path) -> None:
    log(tmp_path, "prompts/old.log", "ERROR the day before")
    log(tmp_path, "generate/again.log", "ERROR the day before, mended since")
    earlier = log_versions(tmp_path)
    log(tmp_path, "generate/again.log", "INFO starting", "INFO done")
    failed = log(tmp_path, "prompts/new.log", "INFO starting", "ERROR data.jsonl: line 37: not valid JSON")
    assert failed_jobs(tmp_path, earlier) == [(failed, "data.jsonl: line 37: not valid JSON")]


def test_logs_of_a_plugins_rules_are_read_as_no_failure(tmp_path: Path) -> None:
    log(tmp_path, "hello/tables.log", "whatever this program says")
    failed = log(tmp_path, "generate/a.log", "ERROR gone")
    assert failed_jobs(tmp_path, {}, ["hello"]) == [(failed, "gone")]
    assert "a job failed:\n  gone\n" in report_failures(tmp_path, {}, ARGV, ["hello"])


def test_a_warning_that_a_job_got_over_is_no_failure(tmp_path: Path) -> None:
    log(tmp_path, "generate/a.log", "WARNING attempt 1: HTTP 500", "ERROR passing trouble", "INFO done")
    assert failed_jobs(tmp_path, {}) == []


def test_the_last_reason_counts_and_a_traceback_behind_it_is_left_in_the_log(tmp_path: Path) -> None:
    path = log(tmp_path, "a.log", "ERROR first", "ERROR unexpected KeyError: 'x'; please report it")
    with path.open("a") as file:
        file.write("Traceback (most recent call last):\n  File 'x.py', line 1\nKeyError: 'x'\n")
    assert failed_jobs(tmp_path, {}) == [(path, "unexpected KeyError: 'x'; please report it")]


def test_a_reason_of_a_huge_log_is_found_at_its_end(tmp_path: Path) -> None:
    path = log(tmp_path, "a.log", *["WARNING attempt 1: " + "é" * 500] * 2000, "ERROR gone")
    assert failed_jobs(tmp_path, {}) == [(path, "gone")]


@pytest.mark.parametrize("lines", [(), ("INFO starting the server",)])
def test_a_job_that_died_without_a_word_is_named(tmp_path: Path, lines: tuple[str, ...]) -> None:
    path = log(tmp_path, "a.log", *lines)
    assert failed_jobs(tmp_path, {}) == [(path, SILENT)]


def test_a_server_held_in_another_terminal_is_no_failure(tmp_path: Path) -> None:
    log(tmp_path, "serve.log", "INFO starting the server")
    assert failed_jobs(tmp_path, {}) == []


def test_one_reason_of_many_jobs_is_one_line(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        log(tmp_path, f"generate/{name}.log", "ERROR server.engine.port: 127.0.0.1:80 is taken")
    log(tmp_path, "prompts/gamma.log", "ERROR gamma: no rows")
    assert report_failures(tmp_path, {}, ARGV) == textwrap.dedent(
        f"""
        Eyas: 3 jobs failed:
          server.engine.port: 127.0.0.1:80 is taken
            log: {tmp_path}/generate/alpha.log, {tmp_path}/generate/beta.log
          gamma: no rows
            log: {tmp_path}/prompts/gamma.log
        Nothing finished is lost. Mend that, then go on with:
          snakemake --cores 2 --directory 'my run'
        """
    )


def test_an_interruption_is_no_failure_but_a_failure_beside_one_is(tmp_path: Path) -> None:
    log(tmp_path, "a.log", "ERROR interrupted")
    assert report_failures(tmp_path, {}, ARGV).startswith("\nEyas: interrupted. Nothing finished is lost.")
    log(tmp_path, "b.log", "ERROR no space")
    assert report_failures(tmp_path, {}, ARGV).startswith("\nEyas: 2 jobs failed:\n")


def test_an_ended_serve_is_no_failed_job(tmp_path: Path) -> None:
    """As Snakemake tells it where it was interrupted itself."""
    log(tmp_path, "serve.log", "INFO starting the server", "INFO serve ends", "INFO done")
    text = report_failures(tmp_path, {}, ["snakemake", "--cores", "1", "serve"])
    assert text == "\nEyas: serve has ended. Start it again with:\n  snakemake --cores 1 serve\n"
    log(tmp_path, "serve.log", "ERROR server.engine.port: 127.0.0.1:80 is taken")
    assert "a job failed:\n  server.engine.port" in report_failures(tmp_path, {}, ["snakemake", "serve"])
    assert "a job failed" in report_failures(tmp_path / "none", {}, ["snakemake", "train"])


def test_without_any_log_the_report_still_says_how_to_go_on(tmp_path: Path) -> None:
    text = report_failures(tmp_path / "none", {}, ARGV)
    assert "could not say why; see above" in text and "snakemake --cores 2" in text


def test_the_command_is_what_the_user_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "snakemake"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command([str(program), "-n", "a b"]) == "snakemake -n 'a b'"
    monkeypatch.setenv("PATH", "")
    assert command([str(program), "-n"]) == f"{program} -n"
    assert command(ARGV) == "snakemake --cores 2 --directory 'my run'"


# --- the line of a job -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (EyasError("config.yaml:3: seed: wrong"), "config.yaml:3: seed: wrong"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out.parquet"),
            "out.parquet: No space left on device; free space or raise the limit, then run the same command again: nothing finished is lost",
        ),
        (
            OSError("[Errno 28] Error writing bytes to file"),
            "unexpected OSError: [Errno 28] Error writing bytes to file; please report it with this job's log",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "logs"),
            "logs: Permission denied; correct the permissions or choose another folder, then run the same command again: nothing finished is lost",
        ),
        (
            ValueError("two\nlines"),
            "unexpected ValueError: two lines; please report it with this job's log",
        ),
    ],
)
def test_every_error_is_one_line(error: Exception, line: str) -> None:
    assert explain(error) == line


PROGRAM = """
import argparse
from eyas.errors import EyasError
from eyas.program import run

def main(arguments):
    {body}

run(main, argparse.ArgumentParser("stage"))
"""


def program(folder: Path, body: str) -> tuple[int, str, str]:
    """Exit status, terminal and log of a program."""
    path = folder / "logs" / "job.log"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body), "--log", str(path)], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr, path.read_text()


def test_a_program_tells_the_terminal_one_line_and_the_log_everything(tmp_path: Path) -> None:
    status, terminal, text = program(tmp_path, "raise EyasError('data.jsonl: line 3: cut; correct it')")
    assert (status, terminal) == (1, "eyas stage: error: data.jsonl: line 3: cut; correct it\n")
    assert text.endswith(" ERROR data.jsonl: line 3: cut; correct it\n") and "Traceback" not in text

    status, terminal, text = program(tmp_path, "{}['missing']")
    assert (status, terminal.count("\n")) == (1, 1)
    assert terminal.startswith("eyas stage: error: unexpected KeyError: 'missing'; please report")
    assert "Traceback" in text and "line 7, in main" in text

    status, terminal, text = program(tmp_path, "raise KeyboardInterrupt")
    assert (status, terminal) == (130, "") and text.endswith(" ERROR interrupted\n")

    assert program(tmp_path, "pass")[:2] == (0, "")
    assert failed_jobs(tmp_path / "logs", {}) == []


@pytest.mark.parametrize("ctrl_c", ["default_int_handler", "SIG_IGN"])
def test_a_cancelled_program_ends_as_after_ctrl_c(tmp_path: Path, ctrl_c: str) -> None:
    """Where the shell lets it ignore Ctrl-C, too; and out of an event loop, whose own handler cancels what runs."""
    for wait in ("time.sleep(30)", "uvloop.run(asyncio.sleep(30))"):
        body = (
            f"import asyncio, os, signal, threading, time, uvloop; signal.signal(signal.SIGINT, signal.{ctrl_c}); "
            f"threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start(); {wait}"
        )
        status, terminal, text = program(tmp_path, body)
        assert (status, terminal) == (130, "") and text.endswith(" ERROR interrupted\n")


def test_a_log_on_a_full_disk_does_not_bury_the_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM.format(body="raise EyasError('journal: full; free space')"),
            "--log",
            "/dev/full",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "eyas stage: error: journal: full; free space\n")


# --- Snakemake's lines -------------------------------------------------------------------------------------------


class Resources(dict[str, object]):
    """As Snakemake's: `items`, but no dict of its own making."""


def record(text: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("snakemake", logging.ERROR, "", 0, text, None, None)
    made.__dict__.update(fields)
    return made


class Full(logging.Formatter):
    """Shows all that it is given."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.msg}|{getattr(record, 'shellcmd', '')}|{getattr(record, 'resources', '')}"


def test_the_terminal_shows_no_settings_and_the_record_keeps_them() -> None:
    brief = Brief(Full())
    error = record("Command 'set -e; \nx --settings {}' returned non-zero exit status 1.", shellcmd="x")
    assert brief.format(error) == "The command returned non-zero exit status 1.|None|"
    killed = record("Command 'x' died with <Signals.SIGKILL: 9>.")
    assert brief.format(killed) == "The command died with <Signals.SIGKILL: 9>.||"
    job = record("", resources=Resources(llm=1, access='{"model": {}}', mem_mb=100))
    assert brief.format(job) == "||{'llm': 1, 'mem_mb': 100}"
    assert job.resources["access"] == '{"model": {}}'  # type: ignore[attr-defined]
    assert "--settings" in error.msg, "the log file is written from the same record"
    assert brief.format(record("eyas prompts: error: x")) == "eyas prompts: error: x||"


def test_only_snakemakes_own_terminal_is_shortened_and_only_once() -> None:
    def handler(name: str) -> logging.Handler:
        made = logging.StreamHandler()
        made.set_name(name)
        made.setFormatter(Full())
        return made

    own, file = handler(HANDLER), handler("DefaultLogFileHandler")
    logger = SimpleNamespace(handlers=[own, file])
    shorten(logger)  # type: ignore[arg-type]
    once = own.formatter
    shorten(logger)  # type: ignore[arg-type]
    assert isinstance(once, Brief) and own.formatter is once
    assert isinstance(file.formatter, Full)


def test_serve_has_the_first_ctrl_c_for_itself_and_no_more_than_that() -> None:
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        leave_ctrl_c_to_serve({"serve"}, local=True)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        for targets, local in (({"serve", "train"}, True), (set(), True), ({"serve"}, False)):
            leave_ctrl_c_to_serve(targets, local=local)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_snakemake_still_names_its_terminal_as_we_expect() -> None:
    from snakemake.logging import LoggerManager
    from snakemake.settings.types import OutputSettings

    logger = logging.getLogger("a test of eyas")
    LoggerManager(logger, OutputSettings())
    assert HANDLER in [one.name for one in logger.handlers]
