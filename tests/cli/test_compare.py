"""The comparison of implementations: all compute the same and report the same measurements."""

import io
import json

import pytest
from rich.console import Console

from bptjax.cli.compare import main
from bptjax.cli.compare_report import best_chunks, conclusions, table

SMALL = ["--num_heads", "2", "--num_kv_heads", "1"]
SMALL += ["--intermediate_size", "32", "--repeats", "2", "--device", "cpu"]


def run(tmp_path, *extra):
    assert main([*SMALL, "--hidden_size", "16", "--out", str(tmp_path), *extra]) == 0
    assert (tmp_path / "compare.png").stat().st_size > 1000
    return json.loads((tmp_path / "rows.json").read_text())


@pytest.mark.thorough
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
    assert "unrolled" in printed and "At 48 tokens " in printed
    assert max(map(len, printed.split("At 48")[0].splitlines())) <= 80


@pytest.mark.thorough
def test_a_sweep_names_the_best_chunks(tmp_path, capsys):
    rows = run(
        tmp_path,
        *("--sweep", "true", "--implementations", '["scan"]'),
        *("--lengths", "[64]", "--chunks", "[16,32]"),
    )
    assert {(r["q_chunk"], r["k_chunk"]) for r in rows} == {(16, 16), (16, 32), (32, 16), (32, 32)}
    fastest = min(rows, key=lambda r: r["step_ms"])
    chunks = f"q_chunk={fastest['q_chunk']} k_chunk={fastest['k_chunk']}, {fastest['step_ms']:.1f}"
    assert f"Best chunks of scan at 64 tokens: {chunks} ms; " in capsys.readouterr().out


def test_refusals_of_implementations_are_rows(tmp_path, monkeypatch):
    reason = "it does not feel like it"
    monkeypatch.setattr("bptjax.ops.attention.scan.unsupported", lambda *_: reason)
    (row,) = run(tmp_path, "--implementations", '["scan"]', "--lengths", "[32]")
    assert row["status"].startswith("refused:") and reason in row["status"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--implementations", '["flash"]'], "'flash': must be one of loop, unrolled"),
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


def measured(implementation, T, step_ms, memory, chunk=512, **more):
    row = dict(implementation=implementation, T=T, q_chunk=chunk, k_chunk=chunk, status="ok")
    row |= dict(step_ms=step_ms, fastest_ms=step_ms * 0.9, slowest_ms=step_ms * 1.2)
    row |= dict(trace_s=12.34, compile_s=123.4, hlo_instructions=123_456, gradient_error=1e-6)
    return row | ({} if memory is None else dict(temp_bytes=memory * 2**20)) | more


WIDE = [
    measured("loop", 1_048_576, 6788.0, None),
    measured("unrolled", 1_048_576, 3600.0, 70_000),
    measured("reference", 1_048_576, 3500.0, 12_000),
    measured("scan", 1_048_576, 3393.9, 10_000),
    measured("scan", 1_048_576, 9999.9, 1, chunk=1024),
    dict(implementation="cudnn", T=1_048_576, q_chunk=512, k_chunk=512, status="refused: no GPU"),
]


def test_sentences_answer_from_the_rows():
    speed, memory, refused = conclusions(WIDE)
    assert speed == (
        "At 1,048,576 tokens scan is fastest: as fast as reference, 1.1 × the speed of unrolled "
        "and 2.0 × the speed of the Python loop."
    )
    assert memory == (
        "At 1,048,576 tokens scan takes the least temporary memory: 83% of reference and 1/7 of "
        "unrolled."
    )
    assert refused == "cudnn: refused: no GPU."
    assert conclusions([measured("scan", 64, 1.25, 3)]) == ["At 64 tokens scan takes 1.2 ms."]
    assert conclusions(WIDE[-1:]) == ["cudnn: refused: no GPU."]
    (_, _, _, best) = best_chunks(WIDE)
    assert best == (
        "Best chunks of scan at 1,048,576 tokens: q_chunk=512 k_chunk=512, 3,393.9 ms; "
        "2.9 × the speed of 1024/1024, the slowest."
    )


@pytest.mark.thorough
def test_the_table_fits_80_columns():
    console = Console(width=80, file=io.StringIO())
    console.print(table(WIDE))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in console.file.getvalue()
    (line,) = (line for line in lines if line.startswith("reference"))
    figures = ["1,048,576", "512/512", "3,500.0", "33", "12,000", "12.3", "123.4", "123,456"]
    assert line.split() == ["reference", *figures, "1e-06"]
    assert any(line.split() == ["cudnn", "1,048,576", "512/512", "refused"] for line in lines)
