"""The studies, at the least sizes: rows have figures or say why not, and the plots are there."""

import csv
from dataclasses import replace

import pytest
import scaling
from step import DECODERS

from bptjax.models.config import ModelConfig

TINY = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1)


def rows(file) -> list[dict[str, str]]:
    assert file.with_suffix(".png").stat().st_size > 10_000
    with file.open() as lines:
        return list(csv.DictReader(lines))


@pytest.fixture
def scale(tmp_path):
    def run(study, *options):
        scaling.main([study, f"--out={tmp_path}", "--repeats=1", *options])
        return rows(tmp_path / f"scaling_{study}.csv")

    return run


def test_attention_is_scaled(scale):
    sizes = "--lengths=64", "--heads", "4", "2", "--head_size=8", "--devices", "1", "2"
    found = scale("attention", *sizes, "--scaling", "strong", "weak", "--strategies=ring")
    told = [(r["devices"], r["order"], r["T"]) for r in found]
    assert told[:4] == [(n, order, "64") for n in "12" for order in ("zigzag", "plain")]
    assert [row[2] for row in told[4:]] == ["64", "64", "128", "128"]
    assert all(r["status"] == "ok" and float(r["tflops_a_device"]) > 0 for r in found)


def test_encoders_are_scaled(scale, monkeypatch):
    small = dict(hidden_size=16, num_heads=2)
    bert, vit = scaling.ENCODERS["bert"], scaling.ENCODERS["vit"]
    monkeypatch.setitem(scaling.ENCODERS, "bert", replace(bert, vocab_size=64, **small))
    monkeypatch.setitem(scaling.ENCODERS, "vit", replace(vit, image_size=(32, 32), **small))
    found = scale("encoder", "--lengths=32", "--rows=2", "--layers=1", "--devices", "2")
    assert [r["status"][:7] for r in found] == ["ok", "ok", "ok", "refused"]
    assert "5 query tokens do not divide" in found[-1]["status"]


def test_steps_are_scaled(scale, monkeypatch):
    monkeypatch.setitem(DECODERS, "1b", TINY)
    sizes = "--lengths=32", "--rows=2", "--devices", "2", "4", "--splits=dp"
    found = scale("step", *sizes, "--memory.ffn_chunk=16")
    assert [r["status"] for r in found] == ["ok", "refused: 2 rows do not divide among 4 devices"]
    assert float(found[0]["tokens_per_second_a_device"]) > 0
