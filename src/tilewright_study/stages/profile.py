"""Stage T3 on files: blocks in, profiles out."""

from tilewright import devices
from tilewright import graph as graph_file
from tilewright.attention import blocks as blocks_file
from tilewright.attention import profile as profile_file
from tilewright.attention.measure import beside_torch, measure
from tilewright.core import progress
from tilewright.core.errors import ConfigError
from tilewright_study import provenance
from tilewright_study.measure import lock


def run(blocks, output, heads, head_dim, dtype, device, split_keys, seed, graph=None):
    """Time the shapes of the work items of each file of `blocks` on a `device` of this kind; write their profiles to
    the paths `output`.

    graph: the graph of all blocks; torch's own attention over it is timed beside them, and every profile states it.
    Files are written when all have been timed. Raises `TilewrightError`; nothing is written then.
    """
    if len(blocks) != len(output):
        raise ConfigError(f"expected one output for each blocks file, found {len(output)} for {len(blocks)}")
    options = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "split_keys": split_keys, "seed": seed}
    with lock.exclusive(device):
        profiles = [
            measure(blocks_file.load(path), device=device, **options)
            for path in progress.with_progress(blocks, "profiles")
        ]
        if graph is not None:
            known, found = {profile.tile: profile for profile in profiles}, graph_file.load(graph)
            profiles = list(beside_torch(known, found, heads=profiles[0].heads, seed=seed).values())
    for path, source, profile in zip(output, blocks, profiles, strict=True):
        made_by = {
            "stage": "profile",
            "parameters": options | {"device": device},
            "inputs": {str(each): provenance.sha256_file(each) for each in (source, graph) if each is not None},
            "code": provenance.code_digest("tilewright.attention.measure", *devices.modules(device, "attention.probe")),
            "versions": provenance.versions("torch", "triton", "numpy"),
        }
        profile_file.save(path, profile, made_by)
        print(f"{profile.tile}: {len(profile.shapes)} shapes, {profile.launch_us:.1f} us a launch")
