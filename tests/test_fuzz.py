"""Damaged input is refused in one line: a few cases of each kind, and all that once failed."""

import json
from pathlib import Path

import fuzz
import pytest

CORPUS = Path(__file__).parent / "fuzz_corpus.json"
NUMBERS = {"configs": 10, "template": 40, "images": 20, "gguf": 30, "tokenizer_json": 30}


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_damaged_input_is_accepted_or_refused(kind):
    number = NUMBERS.get(kind, 60)
    counts, done = fuzz.fuzz(kind, number, seed=5)
    assert not counts.faults
    assert done == number == counts.accepted + counts.refused and counts.accepted and counts.refused


def test_what_once_failed_is_refused():
    cases = json.loads(CORPUS.read_text())
    counts = fuzz.replay(cases)
    assert not counts.faults and counts.refused == len(cases) > 0


def test_a_traceback_and_a_hang_are_faults(monkeypatch, tmp_path):
    """Otherwise the script could find nothing."""

    def check():
        content = (tmp_path / "a").read_bytes()
        if content == b"hang":
            while True:
                pass
        raise KeyError(1) if content == b"key" else RecursionError

    kind = fuzz.Kind(tmp_path, {"a": [b"key"]}, check)
    monkeypatch.setitem(fuzz.KINDS, "own", lambda directory: kind)
    cases = [{"kind": "own", "file": "a", "content": text} for text in ("hang", "key", "other")]
    found = [fault["error"] for fault in fuzz.replay(cases, hang_s=1).faults]
    assert [error.split(":")[0] for error in found] == ["Hang", "KeyError", "exit code 1"]
