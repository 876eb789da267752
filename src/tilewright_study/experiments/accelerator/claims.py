"""What is claimed of the experiment `accelerator`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.accelerator import table_accelerator
from tilewright_study.tables._values import by_name


def _accelerator_folded(column):
    def values(frame, network):
        """A cost of the whole path, whose decoder is folded, over that of the published one, on every hardware."""
        rows = frame[(frame["network"] == network) & frame["path"].str.endswith(" decoder=published")]
        rows = rows.dropna(subset=column)
        return by_name(rows.assign(folded=1 / rows[column]), "folded", "hardware")

    return values


MEASURES = {
    "accelerator_decoder": (table_accelerator.table, _accelerator_folded("decoder_energy_over")),
    "accelerator_whole": (table_accelerator.table, _accelerator_folded("energy_over")),
}
