"""An exporter: one line of numbers a row."""

from eyas import hookimpl
from eyas.plugins import Exporter


class Lengths(Exporter):
    """CSV of row, tokens, and tokens that are trained on."""

    name = "lengths"
    suffix = "csv"

    def write(self, rows, path):
        count = 0
        with path.open("w", encoding="utf-8") as file:
            file.write("id,tokens,supervised\n")
            for row in rows:
                file.write(f"{row.id},{len(row.input_ids)},{sum(row.loss_mask)}\n")
                count += 1
        return count


@hookimpl
def register_exporters(register):
    register(Lengths)
