"""Stage T3 on files: blocks in, profiles out."""

from tilewright import devices
from tilewright.attention import blocks as blocks_file
from tilewright.attention import profile as profile_file
from tilewright.attention.measure import measure
from tilewright.core import progress
from tilewright.core.errors import ConfigError
from tilewright_study import provenance
from tilewright_study.measure import lock


def run(blocks, output, heads, head_dim, dtype, device, split_keys, seed):
    """Time the shapes of the work items of each file of `blocks` on a `device` of this kind; write their profiles to
    the paths `output`.

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
    for path, source, profile in zip(output, blocks, profiles, strict=True):
        made_by = {
            "stage": "profile",
            "parameters": options | {"device": device},
            "inputs": {str(source): provenance.sha256_file(source)},
            "code": provenance.code_digest("tilewright.attention.measure", *devices.modules(device, "attention.probe")),
            "versions": provenance.versions("torch", "triton", "numpy"),
        }
        profile_file.save(path, profile, made_by)
        print(f"{profile.tile}: {len(profile.shapes)} shapes, {profile.launch_us:.1f} us a launch")
