"""Is it worth it: speed-up of a window over dense attention by tokens and density, of a layer and of a whole block."""

from tilewright_study.experiments.worth import table_worth
from tilewright_study.figures import _cells, _style
from tilewright_study.tables import _read

TITLES = {"layer": "attention alone", "block": "whole block of ViT-B"}


def needs(config):
    """What the table of the same name needs."""
    return table_worth.needs(config)


def draw(inputs):
    """Two panels: numbers in cells, red where the plan is faster, hatched where nothing was measured."""
    found = _of_one_device(table_worth.table(inputs))
    tokens, densities = sorted(set(found["tokens"])), sorted(set(found["asked"]))
    drawn = _style.figure(0.42 * len(densities) + 2.1)
    panels = drawn.subplots(1, len(table_worth.MEASURED), sharey=True)
    for axes, part in zip(panels, table_worth.MEASURED, strict=True):
        values = found.pivot(index="asked", columns="tokens", values=f"{part}_ratio").reindex(densities)[tokens]
        image = _cells.draw(axes, values.to_numpy(float))
        axes.set_title(TITLES[part], loc="left")
        axes.set_xticks(range(len(tokens)), [f"{n:,.0f}" for n in tokens])
        axes.set_xlabel("tokens")
    panels[0].set_yticks(range(len(densities)), [f"{density:.0%}" for density in densities])
    panels[0].set_ylabel("pairs that the window keeps")
    _cells.bar(drawn, image, panels)
    _style.head(drawn, _finding(found))
    first = found.iloc[0]
    how = "all but attention compiled" if str(first["compiled"]).lower() == "true" else "not compiled"
    shape = f"{first['heads']:.0f} heads × {first['head_dim']:.0f}, {first['dtype']}, batch {first['batch']:.0f}, {how}"
    window = "A window around each token and one global token."
    _style.notes(drawn, f"× {_style.dense_names(found)}; {shape}; {_read.devices(found)}. {window}")
    return drawn


def _finding(found):
    """From how many tokens on a window pays in a block of a network: at every density, or at the lowest that does."""
    sizes = found.drop_duplicates("asked").set_index("asked")["block_from"].sort_index()
    if sizes.notna().all():
        return f"A window pays from {sizes.max():,.0f} tokens on, whatever it keeps"
    if sizes.notna().any():
        most = sizes.dropna().index[-1]
        return f"A window that keeps {most:.0%} or less pays from {sizes.dropna().max():,.0f} tokens on"
    return "A window pays at none of these sizes"


def _of_one_device(found):
    """The rows of the device and type with the most tokens: several cannot share a picture."""
    key = ["device", "dtype", "batch", "compiled"]
    sets = [rows for _, rows in found.groupby(key, dropna=False, sort=False)]
    return max(sets, key=lambda rows: (rows["tokens"].max(), len(rows)))
