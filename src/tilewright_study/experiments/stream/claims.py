"""What is claimed of the experiment `stream`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.stream import table_stream
from tilewright_study.tables._values import by_name


def _stream(column, scale=1):
    def values(frame, case):
        """A column of what one contender did on a trace: ``<trace>/<contender>/<case>``, or of each case."""
        trace, contender, name = case.split("/")
        rows = frame[(frame["trace"] == trace) & (frame["contender"] == contender) & frame["case"].str.endswith(name)]
        rows = rows.dropna(subset=column)
        return by_name(rows.assign(value=scale * rows[column]), "value", "case", "rung", "trace", "contender")

    return values


MEASURES = {
    "stream_missed": (table_stream.table, _stream("missed", 100)),
    "stream_share": (table_stream.table, _stream("oracle_share", 100)),
    "stream_over_one": (table_stream.table, _stream("over_fixed")),
    "stream_over_static": (table_stream.table, _stream("over_static")),
    "stream_pick_us": (table_stream.table, _stream("pick_us")),
    "stream_switch_us": (table_stream.table, _stream("switch_us")),
}
