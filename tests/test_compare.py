"""The comparison of loops: every way does the same work, and tells the same figures."""

import json

import pytest

from bptjax.compare import main

SMALL = ["--num_heads", "2", "--num_kv_heads", "1"]
SMALL += ["--intermediate_size", "32", "--repeats", "2", "--device", "cpu"]


def run(tmp_path, *extra):
    assert main([*SMALL, "--hidden_size", "16", "--out", str(tmp_path), *extra]) == 0
    assert (tmp_path / "compare.png").stat().st_size > 1000
    return json.loads((tmp_path / "rows.json").read_text())


def test_every_way_does_the_same_work(tmp_path, capsys):
    ways = '["loop","unrolled","scan","fused","reference"]'
    rows = run(tmp_path, "--implementations", ways, "--lengths", "[48]", "--chunks", "[32]")
    assert [(r["T"], r["implementation"]) for r in rows[:2]] == [(48, "loop"), (48, "unrolled")]
    assert len(rows) == 5
    for row in rows:
        assert row["status"] == "ok" and row["gradient_error"] < 1e-5 and row["step_ms"] > 0
        assert row["fastest_ms"] <= row["step_ms"] <= row["slowest_ms"]
        assert ("compile_s" in row) == (row["implementation"] != "loop")
    printed = capsys.readouterr().out
    assert "unrolled" in printed and "gradient error" in printed


def test_a_sweep_names_the_best_chunks(tmp_path, capsys):
    rows = run(
        tmp_path,
        *("--sweep", "true", "--implementations", '["scan"]'),
        *("--lengths", "[64]", "--chunks", "[16,32]"),
    )
    assert {(r["q_chunk"], r["k_chunk"]) for r in rows} == {(16, 16), (16, 32), (32, 16), (32, 32)}
    fastest = min(rows, key=lambda r: r["step_ms"])
    chunks = f"q_chunk={fastest['q_chunk']} k_chunk={fastest['k_chunk']}"
    assert f"best of scan at T=64: {chunks}" in capsys.readouterr().out


def test_what_an_implementation_refuses_is_a_row(tmp_path, monkeypatch):
    reason = "it does not feel like it"
    monkeypatch.setattr("bptjax.ops.attention.scan.unsupported", lambda *_: reason)
    (row,) = run(tmp_path, "--implementations", '["scan"]', "--lengths", "[32]")
    assert row["status"].startswith("refused:") and reason in row["status"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--implementations", '["flash"]'], "'flash'; there are loop, unrolled"),
        (["--lengths", "[0]"], "lengths=[0]"),
        (["--lenghts", "[8]"], "unknown flag --lenghts; nearest: --lengths"),
        (["--hidden_size", "17"], "hidden_size=17"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, capsys, extra, message):
    assert main([*SMALL, "--out", str(tmp_path / "out"), *extra]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()
