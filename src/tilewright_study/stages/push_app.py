"""An app of push memories, mapped, configured and run: the command's function."""

from tilewright.core.errors import ArtifactError, TilewrightError

STEPS = ("map", "configure", "run")


def run(app, memory, step, model_only, output):
    """Write ``program.json`` and ``mapped.json`` (map), ``config.json`` (configure) and ``run.csv`` (run) to the folder
    `output`: all of them, or those of one step, which reads what the first one wrote.

    Raises `TilewrightError`, also where a word differs from numpy's.
    """
    from tilewright.core import registry
    from tilewright.pushmem import memories, stage

    registry.check("memory", memory, memories.NAMES)
    if step in (None, "map"):
        mapped = stage.map_app(app, memory, output)
    else:
        *found, mapped = stage.mapped_app(output)
        if found != [app, memory]:
            raise ArtifactError(f"{output}: expected {app} on {memory}, found {' on '.join(found)}")
    if step in (None, "configure"):
        stage.configure_app(mapped, memory, output)
    if step not in (None, "run"):
        return
    row = stage.run_app(app, mapped, memory, output, hardware=not model_only)
    wrong = [row["error_words_model"], *([] if model_only else [row["error_words_rtl"]])]
    if any(wrong):
        raise TilewrightError(f"{app} on {memory}: expected the words of numpy, found {max(wrong)} that differ")
    told = "RTL: not run" if model_only else "RTL: 0 words differ"
    print(
        f"{app} on {memory}: {row['tiles']} tiles, {row['pes']} PEs, {row['registers']} registers, last output in "
        f"cycle {row['last_cycle']}; 0 of {row['words']} words differ; {told}"
    )
