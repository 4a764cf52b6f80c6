"""Runs a command and prints its peak resident memory in bytes: `python peak.py COMMAND…`.

A process of its own and small, because Linux counts the memory that a process had before exec into its ru_maxrss: a
child of pytest itself would start with pytest's.
"""

import resource
import subprocess
import sys

subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit)
