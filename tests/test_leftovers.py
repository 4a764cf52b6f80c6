"""What killed jobs leave beside their outputs is removed; what living ones write is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from eyas import recordfile

KILLED = """
import os, signal, sys
from pathlib import Path
from eyas import recordfile
target = Path(sys.argv[1])
with recordfile.atomic(target) as file, recordfile.scratch(target) as folder:
    file.write_bytes(b"half")
    (folder / "sorted").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_job_are_removed_by_the_next_writer(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "table")])
    assert len(list(tmp_path.iterdir())) == 2
    with recordfile.atomic(tmp_path / "other") as file:
        file.write_bytes(b"whole")
    assert len(list(tmp_path.glob(".table.*"))) == 2, "another file's leftovers are not ours to remove"
    with recordfile.atomic(tmp_path / "table") as file:
        file.write_bytes(b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"table", "other"}


def test_a_living_writer_and_one_on_another_host_keep_what_they_write(tmp_path: Path) -> None:
    elsewhere, long_ago = tmp_path / ".table.elsewhere.1.ab.tmp", tmp_path / ".table.elsewhere.1.cd.tmp"
    for path in (elsewhere, long_ago):
        path.touch()
    os.utime(long_ago, (time.time() - 3 * recordfile.ABANDONED,) * 2)
    with recordfile.scratch(tmp_path / "table") as mine, recordfile.atomic(tmp_path / "table") as file:
        file.write_bytes(b"whole")
        assert mine.exists() and socket.gethostname() in mine.name
    assert elsewhere.exists() and not long_ago.exists()
