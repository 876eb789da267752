"""Whole networks in T5: compared before they are timed, attention apart from the rest, and names of networks."""

import contextlib
import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from helpers.cases import rest_slow
from helpers.files import entered
from helpers.rows import whole
from tilewright import networks
from tilewright.core import images, timing
from tilewright.core.errors import TilewrightError, UnknownNameError
from tilewright.masks import _gates, dynamicvit
from tilewright.networks import Plans, attention_sites
from tilewright.torch_attention import flex
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.experiments.networks import Row
from tilewright_study.experiments.networks import run as bench
from tilewright_study.measure import clock as clocks
from tilewright_study.measure.effort import Effort
from tilewright_study.tables import _read

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "workflow/scripts/run_experiment.py"
QUICK = Effort(rse=1.0, min_repetitions=3, max_seconds=0.01)
MEMBERS = {name: importlib.import_module(f"tilewright.networks.{name}") for name in networks.NAMES}


SMALL = "dynamicvit-256-64"
# Settings beside the attentions.
REST = ["compiled={}", "plans=[]", "max_seconds=0.01"]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """`SMALL` is as published, but for its width and depth: 64 channels, four blocks. Plans are of one test."""
    monkeypatch.setitem(dynamicvit.VARIANTS, "deit-256", (64, 2, (1, 2, 3)))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))


# Names


@pytest.mark.parametrize(
    ("name", "family", "options"),
    [
        ("vil-tiny-224", "vision_longformer", {"variant": "tiny", "image_size": 224}),
        ("vil-base-wide-384-exact", "vision_longformer", {"window_mode": "exact"}),
        ("vil-small-224-relative-cyclic", "vision_longformer", {"position": "relative", "window_mode": "cyclic"}),
        ("vil-tiny-224x160-exact", "vision_longformer", {"image_size": (224, 160), "window_mode": "exact"}),
        ("regionvit-tiny-224", "regionvit", {"variant": "tiny", "image_size": 224}),
        ("regionvit-small-384-w14-peg", "regionvit", {"variant": "small", "window": 14, "peg": True}),
        ("dynamicvit-s-224", "dynamicvit", {"variant": "deit-s", "image_size": 224}),
        ("dynamicvit-256-96-p32", "dynamicvit", {"variant": "deit-256", "image_size": 96, "patch": 32}),
        ("dynamicvit-lvvit-m-384", "dynamicvit", {"variant": "lvvit-m"}),
    ],
)
def test_a_name_states_a_family_and_its_options(name, family, options):
    found, stated = networks.parse(name)
    assert found == family
    assert options.items() <= stated.items()
    assert MEMBERS[family].name(MEMBERS[family].Options(**stated)) == name


def test_suffixes_may_stand_before_the_size_as_published():
    assert networks.parse("regionvit-small-w14-peg-384") == networks.parse("regionvit-small-384-w14-peg")


def test_options_replace_and_join_what_a_name_states():
    _, options = networks.parse("dynamicvit-deit-s-224-p8", {"keep_ratio": 0.5, "patch": 32})
    assert options == {"variant": "deit-s", "image_size": 224, "patch": 32, "keep_ratio": 0.5}


@pytest.mark.parametrize(
    "name", ["vit-tiny-224", "vil-tiny-224-s1", "vil-tiny-0", "regionvit-huge-224", "regionvit-tiny-224-peg-w14", ""]
)
def test_a_name_of_no_network_lists_how_they_are_named(name):
    with pytest.raises(UnknownNameError, match=f"unknown network '{name}'; known: vil-.*, regionvit-.*, dynamicvit-"):
        networks.parse(name)


def test_names_and_attentions_are_known_without_torch():
    code = (
        "import sys; import tilewright as tw; from tilewright import networks;"
        "networks.parse('vil-tiny-224'); sys.exit('torch' in sys.modules or not callable(tw.networks.create))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


# Photographs


def test_photographs_are_normalised_and_then_mirrored():
    names = list(images.PHOTOGRAPHS)
    found = bench.photographs(len(names) + 2, 16)
    assert found.shape == (len(names) + 2, 3, 16, 16)
    np.testing.assert_array_equal(found[1], _gates.pixels(names[1], 16))
    assert torch.equal(found[len(names) + 1], found[1].flip(2)) and not torch.equal(found[0], found[1])
    assert torch.equal(bench.photographs(2, 16), found[:2])


# Rows


def run(*arguments, **options):
    return whole("networks", bench.run_network(*arguments, **options))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.mktemp("plans")))
        return run("vil-tiny-64", {"native": [1, 2], "dense": [1], "tilewright": [2]}, QUICK)


def test_every_attention_and_batch_has_a_row(rows):
    assert [(row["attention"], row["batch"]) for row in rows] == [
        ("native", 1),
        ("native", 2),
        ("dense", 1),
        ("tilewright", 2),
    ]
    for row in rows:
        assert (row["status"], row["network"], row["resolution"]) == ("ok", "vil-tiny-64", 64)
        assert row["relative_error"] <= row["tolerance"] and row["same_top1"] == 1 and row["largest_logit"] > 0.01
        assert row["attention_error"] <= row["attention_tolerance"]
        family, options = networks.parse("vil-tiny-64")
        assert row["parameters"] == sum(p.numel() for p in networks.create(family, **options).parameters())


def test_images_may_be_no_squares():
    (row,) = run("vil-tiny-64x144", {"native": [1]}, QUICK)
    # A square of 96 pixels a side has as many.
    assert (row["status"], row["network"], row["resolution"]) == ("ok", "vil-tiny-64x144", 96)


def test_attention_and_rest_make_up_the_latency(rows):
    for row in rows:
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["attention_us"] > 0 and row["rest_us"] > 0
        assert row["attention_us"] + row["rest_us"] == pytest.approx(row["p50_us"])
        assert row["images_per_s"] == pytest.approx(row["batch"] / row["p50_us"] * 1e6)
        assert row["repetitions"] >= 3 and row["first_call_s"] > 0


def test_networks_of_one_batch_are_timed_in_turns_as_far_as_they_fit_the_memory(monkeypatch):
    """The third one does not fit beside the others: these are timed first, and freed."""
    together, checked, tried = [], bench._checked, []

    right = timing.time_together

    def noted(calls, **effort):
        together.append(len(calls))
        return right(calls, **effort)

    def full(*arguments, alone=False):
        tried.append(alone)
        return None if len(tried) == 3 else checked(*arguments, alone=alone)

    monkeypatch.setattr(bench.timing, "time_together", noted)
    monkeypatch.setattr(bench, "_checked", full)
    rows = run(SMALL, {"native": [1], "dense": [1, 2], "full": [1]}, QUICK)
    assert together == [2, 1, 1] and tried == [False, False, False, True, False]
    told = [(row["attention"], row["batch"], row["status"]) for row in rows]
    assert told == [("native", 1, "ok"), ("dense", 1, "ok"), ("dense", 2, "ok"), ("full", 1, "ok")]


def test_attention_to_all_keys_has_an_oracle_of_its_own():
    dense, full = run("vil-tiny-64-relative", {"dense": [1], "full": [1]}, QUICK)
    assert full["status"] == "ok" and full["relative_error"] <= full["tolerance"]
    assert full["attention_error"] <= full["attention_tolerance"]
    assert abs(full["largest_logit"] - dense["largest_logit"]) > 1e-3 * dense["largest_logit"]


def hooked(monkeypatch, attention, hook):
    """Let ``hook(network)`` change the networks that are made with `attention`."""
    create = networks.create

    def changed(family, **options):
        network = create(family, **options)
        if options["attention"] == attention:
            hook(network)
        return network

    monkeypatch.setattr(networks, "create", changed)


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        (lambda logits: logits + 1e-3 * logits.std() * (-1) ** torch.arange(1000), "logits differ by 0.001 of"),
        (lambda logits: logits * torch.nan, "differ by nan"),
    ],
    ids=["off", "nan"],
)
def test_a_network_with_other_logits_is_never_timed(monkeypatch, by, reason):
    hooked(monkeypatch, "native", lambda network: network.register_forward_hook(lambda m, x, logits: by(logits)))
    native, dense = run(SMALL, {"native": [1], "dense": [1]}, QUICK)
    assert native["gpu_us"] == ""
    assert native["status"] == "failed" and reason in native["reason"] and "tolerance 0.0001" in native["reason"]
    assert native["p50_us"] == native["attention_us"] == native["images_per_s"] == ""
    assert dense["status"] == "ok"


def off_in_16_bits(network, by):
    """Logits differ by a share of their spread."""

    def change(module, images, logits):
        return logits * (1 + by * (images[0].dtype == torch.bfloat16))

    network.register_forward_hook(change)


@pytest.mark.parametrize(
    ("own", "tolerance", "by", "status"),
    [
        *((0.008, 0.024, 0.02, "ok"), (0.008, 0.024, 0.03, "failed")),
        *((0.02, 10 / 256, 0.03, "ok"), (0.02, 10 / 256, 0.05, "failed")),
        *((0.1, 0.1, 0.08, "ok"), (0.1, 0.1, 0.12, "failed"), (0.3, 0.1, 0.2, "failed")),
    ],
)
def test_in_16_bits_the_tolerance_is_what_the_type_costs_dense_attention(monkeypatch, own, tolerance, by, status):
    """Dense attention off by 0.008 in 16 bits leaves others 0.024 from what it gives in float32; at most 0.04, or as
    much as it is off itself."""
    hooked(monkeypatch, "dense", partial(off_in_16_bits, by=own))
    hooked(monkeypatch, "native", partial(off_in_16_bits, by=by))
    (row,) = run(SMALL, {"native": [1]}, QUICK, dtype="bfloat16")
    assert (row["status"], row["dtype"]) == (status, "bfloat16")
    assert row["tolerance"] == pytest.approx(tolerance, rel=0.03)


def test_weights_are_rounded_to_the_type(monkeypatch):
    seen = []
    hooked(monkeypatch, "native", lambda network: seen.append(network))
    (row,) = run(SMALL, {"native": [1]}, QUICK, dtype="float16")
    assert row["status"] == "ok" and row["max_abs_error"] <= 1e-4
    assert {weights.dtype for weights in seen[0].parameters()} == {torch.float16}


@pytest.mark.parametrize("name", ["vil-tiny-64-relative", "regionvit-tiny-64", SMALL])
@torch.inference_mode()
def test_with_peaked_weights_attention_prefers_some_keys_and_adds_to_the_tokens(name):
    family, options = networks.parse(name)
    sizes = []

    def measure(run, q, k, v):
        # The tokens of a few are alike.
        if k.shape[2] > 16:
            sizes.append((q @ k.mT * q.shape[-1] ** -0.5).std(-1).mean().item())
        return run(q, k, v)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_sites, "timed", lambda run, *inputs: measure(run, *inputs) if len(inputs) == 3 else run(*inputs)
        )
        network = bench.peaked(networks.create(family, **options, attention="native"))
        network(bench.photographs(1, options["image_size"]))
    assert sizes and 0.5 <= np.median(sizes) <= 3
    tables = [table for name, table in network.named_parameters() if name.endswith(("rel_pos", "bias_table"))]
    assert all(0.9 <= table.std() <= 1.1 for table in tables) and bool(tables) == (name != SMALL)


def _refuse(images):
    raise RuntimeError("no kernel")


def test_other_plans_have_rows_of_their_own():
    plans = (Plans(reorder="none", solver="greedy"), Plans(solver="highs-paper", tiles=("16x1",)))
    own, plain, paper = run("vil-tiny-32", {"tilewright": [1]}, QUICK, plans=plans)
    stated = [(row["status"], row["reorder"], row["solver"], row["tiles"]) for row in (own, plain, paper)]
    assert stated == [("ok", "", "", ""), ("ok", "none", "greedy", ""), ("ok", "window", "highs-paper", "16x1")]
    assert plain["attention_error"] <= plain["attention_tolerance"] and plain["p50_us"] > 0


def test_plans_of_a_network_without_fixed_patterns_are_skipped_with_the_reason():
    own, other = run(SMALL, {"tilewright": [1]}, QUICK, plans=(Plans(reorder="none"),))
    assert own["status"] == "ok"
    assert (other["status"], other["p50_us"]) == ("skipped", "") and "depend on the image" in other["reason"]


def test_compiled_networks_have_rows_of_their_own(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda network, dynamic: partial(network))
    eager, compiled = run(SMALL, {"native": [1]}, QUICK, compiled={"native": [1]})
    assert (eager["compiled"], compiled["compiled"]) == (False, True)
    assert compiled["status"] == "ok" and compiled["relative_error"] <= compiled["tolerance"]
    assert compiled["p50_us"] > 0 and compiled["attention_us"] == ""


@pytest.mark.parametrize("case", rest_slow(["vil-tiny-64", "regionvit-tiny-64"], 0))
def test_a_network_is_compiled_whole_and_without_the_tables_that_its_first_call_makes(monkeypatch, case):
    # Compiling takes as long as there are blocks.
    monkeypatch.setitem(MEMBERS["vision_longformer"].BLOCKS, "tiny", (1, 1, 2, 1))
    monkeypatch.setitem(MEMBERS["regionvit"].SIZES, "tiny", ((1, 1, 2, 1), 3))
    made, compiler = [], torch.compile

    def counting(graph, inputs):
        made.append({getattr(node.target, "__name__", node.target) for node in graph.graph.nodes})
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(compiler, backend=counting))
    (row,) = run(case, {}, QUICK, compiled={"tilewright": [1]})
    assert row["status"] == "ok", row["reason"]
    (called,) = made
    assert "layer_norm" in called and called.isdisjoint({"arange", "argsort", "empty", "setitem"})


def test_networks_that_are_compiled_stay_so_while_others_take_turns(monkeypatch):
    """Three of one class, more than torch would keep: each is compiled once, before anything is timed."""
    made, at_first, compiler, right = [], [], torch.compile, timing.time_together

    def counting(graph, inputs):
        made.append(graph)
        return graph.forward

    def noted(calls, **effort):
        at_first.append(len(made))
        return right(calls, **effort)

    monkeypatch.setattr(torch, "compile", partial(compiler, backend=counting))
    monkeypatch.setattr(bench.timing, "time_together", noted)
    # The configuration of torch loses what pytest restores.
    with torch._dynamo.config.patch(recompile_limit=1):
        rows = run(SMALL, {}, QUICK, compiled={"native": [1, 2], "full": [1]})
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert at_first[0] == len(made) >= 3


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda network: lambda images: 1.001 * network(images), "logits differ by"),
        (lambda network: _refuse, "RuntimeError: no kernel"),
    ],
    ids=["off", "refused"],
)
def test_a_compiled_network_with_other_logits_is_never_timed(monkeypatch, broken, reason):
    monkeypatch.setattr(torch, "compile", lambda network, dynamic: broken(network))
    eager, compiled = run(SMALL, {"native": [1]}, QUICK, compiled={"native": [1]})
    assert eager["status"] == "ok"
    assert (compiled["status"], compiled["p50_us"]) == ("failed", "") and reason in compiled["reason"]


def test_networks_of_one_pattern_and_other_windows_have_plans_of_their_own():
    """Both attend to everything in their second stage, where one orders the tokens by chunks."""
    for name in ("vil-tiny-64", "vil-tiny-64-relative-exact"):
        (row,) = run(name, {"tilewright": [1]}, QUICK)
        assert row["status"] == "ok", row["reason"]


def test_what_cannot_run_is_skipped_with_the_reason(monkeypatch):
    def refuse(module, inputs):
        raise sparse_baselines.Unavailable("no C++ compiler to compile FlexAttention with")

    hooked(monkeypatch, "flex", lambda network: network.register_forward_pre_hook(refuse))
    flex, native = run(SMALL, {"flex": [1], "native": [1]}, QUICK)
    assert (flex["status"], flex["reason"]) == ("skipped", "no C++ compiler to compile FlexAttention with")
    assert flex["p50_us"] == flex["max_abs_error"] == flex["first_call_s"] == ""
    assert native["status"] == "ok"


def test_the_share_of_attention_is_that_of_the_timed_calls(monkeypatch):
    """The clock stands still but for attention, which takes a thousand seconds before the timing and one in it."""
    calls = iter([1000.0] * 3 + [1.0] * 100)

    @contextlib.contextmanager
    def clocked():
        yield clocks.Clock(next(calls))

    monkeypatch.setattr(clocks, "clocked", clocked)
    (row,) = run(SMALL, {"native": [1]}, Effort(rse=1.0, min_repetitions=5, max_seconds=5))
    assert row["attention_us"] == 1e6


# The command line


def command(*arguments):
    """Run the script in this process."""
    entered(SCRIPT, "--experiment", "networks", "--min-repetitions", 3, *arguments)


def test_a_file_of_rows_is_written(tmp_path, capsys):
    path = tmp_path / "out.csv"
    chosen = ["--set", "attention={native: [1, 2], dense: [1]}", *REST]
    command("--case", SMALL, *chosen, "--output", str(path))
    assert tuple(pd.read_csv(path).columns) == Row.columns()
    (frame,) = _read.frames([path], "networks")
    assert frame["status"].tolist() == ["ok"] * 3 and (frame["p50_us"] > 0).all()
    assert f"{SMALL} native, batch 2: " in capsys.readouterr().out


def test_first_calls_are_made_of_what_compiles_alone(tmp_path, monkeypatch):
    seen, fastest = [], flex.fastest

    def recorded(form, variants, q, k, v):
        seen.append(len(q))
        return fastest(form, variants[:1], q, k, v)

    monkeypatch.setattr(flex, "fastest", recorded)
    # Which calls are made, and not of what code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(bench.timing, "time_call", lambda *a, **k: pytest.fail("timed"))
    path = tmp_path / "compiled.txt"
    chosen = ["--set", "attention={native: [1], flex: [1, 2]}", *REST]
    command("--compile-only", "--case", "vil-tiny-32", *chosen, "--output", str(path))
    assert path.read_text() == "flex, batch 1\nflex, batch 2\n"
    assert set(seen) == {1, 2}


NATIVE = "attention={native: [1]}"


@pytest.mark.parametrize(
    ("case", "chosen", "more", "message"),
    [
        ("vit-tiny-32", NATIVE, "", "unknown network 'vit-tiny-32'"),
        (SMALL, "attention={magic: [1]}", "", "unknown attention 'magic'; known: dense"),
        (
            SMALL,
            "attention=native",
            "",
            r"experiment networks: Expected `object`, got `str`.*; settings: attention, compiled, plans, max",
        ),
        (SMALL, "attention={native: [0]}", "", r"attention.native: expected at least 1, found 0"),
        (SMALL, "atention={native: [1]}", "", "unknown field `atention`"),
        ("vil-tiny-8", NATIVE, "", "leaves no token at stage 3"),
        (SMALL, NATIVE, "--dtype float64", "unknown dtype 'float64'; known: float32, float16, bfloat16"),
        (SMALL, NATIVE, "--device tpu", "found 'tpu'; known: cpu, cuda"),
    ],
)
def test_wrong_arguments_are_refused_and_write_nothing(tmp_path, case, chosen, more, message):
    arguments = ["--case", case, "--set", chosen, *REST, *more.split()]
    with pytest.raises(TilewrightError, match=message):
        command(*arguments, "--output", str(tmp_path / "x.csv"))
    assert not (tmp_path / "x.csv").exists()


def test_every_family_has_names_for_its_networks():
    for name in networks.NAMES:
        module = importlib.import_module(f"tilewright.masks.{name}")
        example = module.NETWORK_NAMING.rpartition("e.g. ")[2]
        assert networks.parse(example)[0] == name
