"""Runs a command and prints its peak resident memory in bytes and its CPU time in seconds: `python peak.py COMMAND…`.

A process of its own and small, because Linux counts the memory that a process had before exec into its ru_maxrss: a
child of pytest itself would start with pytest's.
"""

import resource
import subprocess
import sys

subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
print(used.ru_maxrss * unit, used.ru_utime + used.ru_stime)
