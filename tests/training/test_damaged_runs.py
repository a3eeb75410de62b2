"""Damaged files of a run directory are refused in one line, or left out: named cases, and a few
that a seed decides."""

import json
import random
import shutil

import pytest

from bptjax.cli.train import main

CASES = {
    "config.yaml": [
        b"1: 2\n",
        b"null: 2\n",
        b"config: 1.5\n",
        b"a: " + b"[" * 3000,
        b"\xff",
        b"[]",
    ],
    "metrics.jsonl": [
        b'{"step": "a", "train/loss": 1}\n',
        b'{"step": null}\n',
        b'{"step": [1]}\n[]\nnull\n3\n',
        b'{"step": 1, "train/loss": "a", "eval/loss": [1]}\n',
        b'{"step": 1, "eval/loss": NaN, "train/tokens_seen": 1e999}\n',
        b'{"step": 1e400, "train/loss": true}\n',
        b"[" * 100_000,
        b'{"step": 1, "train/loss": ' + b"9" * 4000 + b"}\n",
    ],
    "run.json": [b"[]", b"[" * 100_000, b'{"compile_seconds": "a", "memory": [], "data": 3}'],
    "log.txt": [b"\xff\xfe\x00\n" * 3],
    "checkpoints/20/manifest.json": [b"[" * 100_000, b"[]", b'{"step": 20}', b'{"meta": 1}'],
    "predictions.jsonl": [b'{"step": 1}\n', b'{"step": "a"}\n'],
    "best.json": [b"[]", b"{}", b'{"step": "../.."}'],
    "checkpoints/18.orbax-checkpoint-tmp": [b""],
    "checkpoints/99999999999": [b""],
}
SPLICES = [b"null", b"[]", b"{}", b'"a"', b"-1", b"1e999", b"\x00", b"\xff", b"[" * 9, b"\n"]


def mutated(uninterrupted, name, seed):
    rng = random.Random(seed)
    data = (uninterrupted / name).read_bytes()
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        data = data[:at] + rng.choice(SPLICES) + data[at + rng.randrange(12) :]
    return data


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_damaged_files_of_a_run(arguments, uninterrupted, tmp_path, capsys, name):
    cases = [*CASES[name]]
    if (uninterrupted / name).exists():
        cases += [mutated(uninterrupted, name, seed) for seed in range(6)]
    command = [*arguments, "--train.sample_tokens=0", "--train.max_steps=20"]
    for number, content in enumerate(cases):
        run_dir = shutil.copytree(uninterrupted, tmp_path / f"{number}")
        (run_dir / name).write_bytes(content)
        code = main([*command, f"--run_dir={run_dir}"])
        out, error = capsys.readouterr()
        assert code in (0, 1, 2) and error.count("\n") == (code > 0), (content, error)
        assert "\x00" not in out + error and (code == 2) <= (f"{run_dir}" in error)
        if name.startswith("run.json"):  # Written anew.
            assert code == 0 and isinstance(json.loads((run_dir / "run.json").read_text()), dict)


@pytest.mark.parametrize("content", [*CASES["config.yaml"], b"config: x.yaml\n", b"data: 1.5\n"])
def test_a_damaged_config_is_refused(tmp_path, capsys, content):
    (tmp_path / "a.yaml").write_bytes(content)
    assert main([f"--config={tmp_path / 'a.yaml'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
