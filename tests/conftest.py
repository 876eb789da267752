"""What every test runs under: memory that torch hands out uninitialised holds NaN, so that an unwritten row is seen."""

import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

# Read by GNU OpenMP when torch is loaded: its threads do not wait actively for the next operator. They would keep the
# cores from the tests of the other process, and take three times the processor time.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# What torch's compiler asks of this processor is compiled and loaded in processes of their own, for every process that
# compiles. Any g++ that can read torch's headers knows these instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Examples take longer beside other work, which is no fault.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
# Before any kernel is imported.
importlib.import_module("helpers.gpu")


# Files whose tests take longest, from the longest on; those on SLURM mostly wait.
LONGEST = (
    *("study/test_slurm", "study/test_workflow", "study/test_workflow_plans", "attention/cuda/test_backward_kernels"),
    *("study/test_mutations", "study/test_claims", "study/test_figures", "pushmem/test_apps", "study/test_report"),
    *("attention/cuda/test_calibration", "study/test_origins", "pushmem/test_solve", "test_pages", "pushmem/test_bmc"),
    *("slices/predictors/test_predict", "training/test_segmentation", "networks/cuda/test_map_kernels"),
    *("attention/cuda/test_bias_steps", "study/test_networks_experiment", "study/test_pruned_experiment"),
    *("networks/test_swin", "networks/test_sites", "study/test_static_networks", "integrations/test_hosts"),
)


def pytest_configure(config):
    """Each of the processes that run tests rewrites its share of the files first, and then reads what the others wrote:
    their asserts take half of the time until all tests are known."""
    own, tests = getattr(config, "workerinput", None), Path(__file__).parent
    if own is None or sys.dont_write_bytecode or [Path(each).resolve() for each in config.args] != [tests]:
        return
    files = sorted(tests.rglob("test_*.py"))
    for path in files[int(own["workerid"].removeprefix("gw")) :: own["workercount"]]:
        folder = rewrite.get_cache_dir(path)
        kept = folder / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(folder):
            # What cannot be read is said where it is collected.
            with contextlib.suppress(SyntaxError):
                source, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)


def pytest_collection_modifyitems(items):
    """Files are shared out to processes in order: the longest go first, so that none of them is the last."""
    order = {f"{name}.py": place for place, name in enumerate(LONGEST)}
    tests = Path(__file__).parent
    items.sort(key=lambda item: order.get(item.path.relative_to(tests).as_posix(), len(order)))


def pytest_collection_finish():
    """What is loaded by now stays, and the garbage collector passes it by: otherwise that takes a tenth of the time, as
    timed code calls it before each timing. It comes by itself less often, too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)


@pytest.fixture(autouse=True, scope="module")
def passed_by():
    """So does what a file leaves behind: what compilers keep would be looked through again and again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def nan_in_fresh_memory():
    if "torch" in sys.modules:
        # warn_only: the flag also asks for deterministic operators, which is not what is tested here.
        sys.modules["torch"].use_deterministic_algorithms(True, warn_only=True)
    yield


# Folders whose tests compute on one core: two processes run tests, and threads of each that wait for one another take a
# fifth more processor time. Operators that share out their work have tests in other folders.
ONE_CORE = {"cuda", "networks", "training", "study", "paths", "scenes", "integrations", "nn", "benchmarks", "baselines"}


@pytest.fixture(autouse=True, scope="module")
def one_core(request):
    alone = "torch" in sys.modules and ONE_CORE & {*request.path.relative_to(Path(__file__).parent).parts}
    with importlib.import_module("helpers.threads").threads(1) if alone else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_weights():
    """Weights are drawn without a cut, in a tenth of the time: the published cut lies at 100 standard deviations."""
    if "torch" not in sys.modules:
        yield
        return
    init = sys.modules["torch"].nn.init
    with pytest.MonkeyPatch.context() as patch:
        # Other packages draw by it, too, and state the cut and the generator.
        patch.setattr(
            init,
            "trunc_normal_",
            lambda tensor, mean=0.0, std=1.0, a=None, b=None, generator=None: init.normal_(
                tensor, mean, std, generator
            ),
        )
        yield
