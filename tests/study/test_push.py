"""Programs on push memories in the study: the section, rows of files that were written, tables and figures."""

import pytest
from test_figures import configured, texts

from helpers import synthetic
from helpers.checkout import ROOT
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright_study import experiments, figures
from tilewright_study.experiments import push, push_attention, push_streams
from tilewright_study.experiments.push import table_push as push_table
from tilewright_study.experiments.push_attention import table_push_attention as attention_table
from tilewright_study.experiments.push_streams import table_push_streams as streams_table
from tilewright_study.stages import push_app
from tilewright_study.tables import _read

PAPER = ROOT / "expected/paper/push.csv"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apps": ["gausian-64"]}, r"push.apps: unknown app 'gausian-64'; known: brighten_blur-<side>"),
        ({"apps": ["gaussian"]}, r"push.apps: unknown app 'gaussian'"),
        ({"apps": ["gaussian-64", "gaussian-64"]}, r"push.apps: 'gaussian-64' appears twice"),
        ({"memories": ["sram"]}, r"push.memory: unknown memory 'sram'; known: pub, dp"),
        ({"streams": {"identity-16x16": ["guess"]}}, r"push.streams.identity-16x16: unknown engine 'guess'"),
        ({"attention": ["vil-tiny-224-s9"]}, r"push.attention: "),
        (
            {"attention": ["dynamicvit-s-224"]},
            r"expected a workload with windows, .*found 'dynamicvit-s-224'",
        ),
    ],
    ids=str,
)
def test_a_wrong_section_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        configured(push=changes)


def test_empty_lists_leave_programs_out():
    study = configured(push={"apps": [], "attention": []})
    shown, listed = figures.selected(study)
    assert not {"push_tiles"} & set(shown)
    assert not {"push", "push_attention"} & set(listed) and "configure" in listed


def rows_of(case, folder):
    return list(push.run(case, push.Settings(str(folder)), None))


def test_rows_tell_what_the_files_say(tmp_path):
    push_app.run("brighten_blur-24", "pub", None, False, tmp_path)
    whole, *others = rows_of("brighten_blur-24.pub", tmp_path)
    assert (whole["tiles"], whole["wrong_model"], whole["asked"], whole["agreed"]) == (1, 0, 1, 1)
    assert "wrong_rtl" not in whole and whole.get("status", "ok") == "ok"
    assert {row["part"] for row in others} == {"live", "port"}
    for row in (whole, *others):
        push.Row.of(row)
    with pytest.raises(ArtifactError, match="expected gaussian-24 on pub, found brighten_blur-24 on pub"):
        rows_of("gaussian-24.pub", tmp_path)


def test_words_that_differ_fail_a_row(tmp_path):
    push_app.run("brighten_blur-24", "pub", None, False, tmp_path)
    text = (tmp_path / "run.csv").read_text()
    (tmp_path / "run.csv").write_text(text.replace(",0,not run,", ",3,not run,"))
    whole = rows_of("brighten_blur-24.pub", tmp_path)[0]
    assert whole["status"] == "failed" and "'model': '3'" in whole["reason"]


def test_published_numbers_stand_beside_ours(tmp_path):
    synthetic.write_push(tmp_path, configured(push={"apps": ["gaussian-64", "camera-64"], "memories": ["pub"]}))
    found = push_table.table([PAPER, *tmp_path.rglob("push/*.csv")]).set_index("app")
    assert found.loc["gaussian-64", "paper_tiles"] == 1 and found.loc["camera-64", "paper_tiles"] == 2
    assert found.loc["gaussian-64", "from_streams"] == "1 of 1"


def test_keys_of_a_small_layer_are_all_delivered():
    (row,) = push_attention.run("vil-tiny-56-s1", push_attention.Settings({}, False), None)
    assert row.get("status", "ok") == "ok" and (row["wrong"], row["queries"]) == (0, 0)
    assert row["bound"] < row["cycles"] <= row["cycles_global"] and row["words"] < row["gathered"]


def test_a_layer_that_does_not_fit_says_why():
    (row,) = push_attention.run("vil-tiny-64-s1", push_attention.Settings({}, False), None)
    assert row["status"] == "failed" and "chunks of 7 do not cover a grid of 16 x 16" in row["reason"]


def test_deliveries_that_are_wrong_fail_the_row(monkeypatch):
    from tilewright_study.experiments.push_attention import array as attention

    monkeypatch.setattr(attention, "rows_that_differ", lambda *_: 2)
    (row,) = push_attention.run("vil-tiny-56-s1", push_attention.Settings({}, False), None)
    assert row["status"] == "failed" and row["reason"] == "expected none, found queries 2"


def test_times_of_processors_stand_beside_the_arrays(tmp_path):
    name = "vil-tiny-224-s1"
    synthetic.write_csv(tmp_path / "a.csv", "push_attention", [synthetic.push_attention_row(name)])
    headline = {"device": "NVIDIA X", **_read.HEADLINE}
    plans = ((900, {"device": "CPU"}), (10, headline), (5, headline | {"solver": "descent"}))
    timed = [synthetic.row(name, "tilewright", us, **how) for us, how in plans]
    synthetic.write_csv(tmp_path / "b.csv", "attention", timed)
    found = attention_table.table([tmp_path / "a.csv", tmp_path / "b.csv"]).iloc[0]
    assert (found["here_ms"], found["gpu_ms"], found["gpu"]) == (0.9, 0.01, "NVIDIA X")
    alone = attention_table.table([tmp_path / "a.csv"]).iloc[0]
    assert alone.isna()["here_ms"] and alone["here"] == ""


def test_a_figure_names_what_differs(tmp_path):
    rows = [synthetic.push_row("gaussian-64", "pub"), synthetic.push_row("harris-64", "pub", wrong_model=3)]
    synthetic.write_csv(tmp_path / "push.csv", "push", rows)
    drawn = figures.member("push_tiles").draw([PAPER, tmp_path / "push.csv"])
    assert "1 of 2 give each word of numpy" in texts(drawn)


def test_cases_read_what_the_rules_write():
    study = configured(push={"apps": ["harris-64"], "memories": ["dp"]})
    (case,) = experiments.cases("push", study)
    assert experiments.sources("push", study, case) == [
        f"results/push/harris-64/dp/{name}" for name in ("mapped.json", "config.json", "run.csv")
    ]


STREAMED = push_streams.Settings({}, ("none", "hc"), ("64x1", "64x64"), 128, {})


def test_key_streams_are_told_by_order_and_tile():
    rows = list(push_streams.run("vil-tiny-64-s1", STREAMED, None))
    assert [(r["reorder"], r["tile"]) for r in rows] == [(o, t) for o in STREAMED.orders for t in STREAMED.tiles]
    for row in rows:
        push_streams.Row.of(row)
        assert row.get("status", "ok") == "ok" and row["wrong"] == 0
        assert 0 < row["pieces"] <= row["keys"] and row["words"] >= 2 * row["pieces"] and row["longest"] <= row["keys"]


def test_pieces_that_give_other_keys_fail_the_row(monkeypatch):
    from tilewright_study.experiments.push_streams import pieces

    right = pieces.pieces
    monkeypatch.setattr(pieces, "pieces", lambda keys: right(keys)[:-1])
    assert {r["status"] for r in push_streams.run("vil-tiny-64-s1", STREAMED, None)} == {"failed"}


def test_keys_stand_beside_those_without_an_order(tmp_path):
    rows = [synthetic.push_streams_row("vil-tiny-224-s1", order, "64x1") for order in ("none", "hc")]
    synthetic.write_csv(tmp_path / "s.csv", "push_streams", rows)
    found = streams_table.table([tmp_path / "s.csv"]).set_index("reorder")
    assert found["of_none"].to_dict() == {"none": 1, "hc": 0.75} and found.loc["hc", "keys_a_word"] == 4.5
