# Where the checkout is, from which Eyas is imported. Included before the config is read.
import sys
from pathlib import Path

ROOT = Path(str(workflow.current_basedir)).parent
sys.path.insert(0, str(ROOT))

from eyas.config import read_yaml
from eyas.errors import EyasError


def check_yaml(file):
    """Ends the run with file and line if `file` is no YAML, which Snakemake tells without a line."""
    if file.is_file():
        try:
            read_yaml(file)
        except EyasError as error:
            sys.exit(f"eyas: error: {error}")
