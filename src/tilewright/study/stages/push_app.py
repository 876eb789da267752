"""An app of push memories, mapped, configured and run: the command's function."""

from tilewright.core.errors import TilewrightError


def run(app, memory, model_only, output):
    """Write ``program.json``, ``mapped.json``, ``config.json`` and ``run.csv`` to the folder `output`.

    Raises `TilewrightError`, also where a word differs from numpy's.
    """
    from tilewright.core import registry
    from tilewright.pushmem import memories, stage

    registry.check("memory", memory, memories.NAMES)
    mapped = stage.map_app(app, memory, output)
    stage.configure_app(mapped, memory, output)
    row = stage.run_app(app, mapped, memory, output, hardware=not model_only)
    wrong = [row["error_words_model"], *([] if model_only else [row["error_words_rtl"]])]
    if any(wrong):
        raise TilewrightError(f"{app} on {memory}: expected the words of numpy, found {max(wrong)} that differ")
    told = "RTL: not run" if model_only else "RTL: 0 words differ"
    print(
        f"{app} on {memory}: {row['tiles']} tiles, {row['pes']} PEs, {row['registers']} registers, last output in "
        f"cycle {row['last_cycle']}; 0 of {row['words']} words differ; {told}"
    )
