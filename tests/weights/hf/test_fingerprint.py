"""The fingerprint of a base model covers every byte, and its cache never returns a stale digest."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bptjax.models.config import ModelConfig
from bptjax.weights.hf import fingerprint as module
from bptjax.weights.hf.fingerprint import PIECE, SETTLED, _entry, _hashed, fingerprint
from bptjax.weights.hf.tensors import Tensors
from bptjax.weights.pretrained import open_pretrained


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bptjax" / "fingerprints"


@pytest.fixture
def at_once(monkeypatch):
    """Caches digests of files that were just written, by a clock that is ahead."""
    now = time.time
    monkeypatch.setattr(module.time, "time", lambda: now() + SETTLED + 1)


def offsets(file):
    """First and last byte + 1 of each tensor of a safetensors file, by name."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return {name: [8 + size + x for x in t["data_offsets"]] for name, t in header.items()}


def flip(file, at):
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("piece", [PIECE, 100_000])
def test_a_flipped_byte_in_any_tensor_is_noticed(tmp_path, piece):
    file = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    save_file({f"t{i:02}": rng.random(13_000) for i in range(39)}, file)
    whole = _hashed(file, piece)
    for begin, end in offsets(file).values():
        flip(file, (begin + end) // 2)
        assert _hashed(file, piece) != whole
        flip(file, (begin + end) // 2)
    assert _hashed(file, piece) == whole
    # The header, the first and last bytes, and the length.
    for at in (0, 9, file.stat().st_size - 1):
        flip(file, at)
        assert _hashed(file, piece) != whole
        flip(file, at)
    file.write_bytes(file.read_bytes() + b"\0")
    assert _hashed(file, piece) != whole


def test_bytes_that_move_between_files_are_noticed(tmp_path):
    def of(*contents):
        files = [tmp_path / str(i) for i in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        return fingerprint(files)

    assert len({of(b"ab", b""), of(b"a", b"b"), of(b"", b"ab"), of(b"ab"), of(b"b", b"a")}) == 5


def test_a_cached_digest_is_used_and_no_other(tmp_path, cache, monkeypatch, at_once):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    first = fingerprint([file])
    assert len(list(cache.iterdir())) == 1

    with monkeypatch.context() as patch:
        patch.setattr(module, "_piece", None)
        assert fingerprint([file]) == first
    # The same size and time of modification. The inode's time has steps of some milliseconds.
    stat = file.stat()
    time.sleep(0.05)
    flip(file, 0)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint([file]) != first
    # Another file under this name.
    (tmp_path / "other").write_bytes(b"two")
    os.utime(tmp_path / "other", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "other").replace(file)
    assert fingerprint([file]) != first
    assert len(list(cache.iterdir())) == 1


def test_a_file_that_was_just_written_is_not_cached(tmp_path, cache):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    fingerprint([file])
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]\n", b"{}\nnothing\n", b"a\nb\nc\n"])
def test_a_damaged_cache_is_ignored(tmp_path, content, at_once):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    right = fingerprint([file])
    _entry(file).write_bytes(content)
    assert fingerprint([file]) == right


def test_a_flipped_digit_of_a_cached_digest_is_ignored(tmp_path, at_once):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    right, entry = fingerprint([file]), _entry(file)
    text = entry.read_text()
    for at in range(0, len(text) - 1, 7):
        entry.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        assert fingerprint([file]) == right


def test_a_cache_that_cannot_be_written_is_skipped(tmp_path, monkeypatch, at_once):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    right = fingerprint([file])
    # A file where a directory belongs fails for root, too.
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert fingerprint([file]) == right
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(file))
    assert fingerprint([file]) == right
    monkeypatch.setenv("HOME", "~")  # As for a user who has no home directory.
    assert fingerprint([file]) == right and not (tmp_path / "~").exists()


@pytest.mark.thorough
def test_processes_share_the_cache(tmp_path, cache):
    """Several hash and cache the same files at once; each gets the same answer."""
    files = [tmp_path / str(i) for i in range(20)]
    for file in files:
        file.write_bytes(file.name.encode() * 1000)
    code = (
        "import sys; from pathlib import Path; from bptjax.weights.hf import fingerprint as f; "
        "f.SETTLED = -1.0; "
        "print(*{f.fingerprint([Path(x) for x in sys.argv[1:]]) for _ in range(20)})"
    )
    command = [sys.executable, "-c", code, *map(str, files)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate()[0].strip() for process in started}
    assert said == {fingerprint(files)}
    assert len(list(cache.iterdir())) == 20


def base(tmp_path, name="base"):
    from weights.hf.cases import config
    from weights.hf.loading import random_base

    return random_base(tmp_path / name, config("llama"))


def test_files_that_are_not_read_do_not_count(tmp_path):
    directory = base(tmp_path)
    before = open_pretrained(ModelConfig(name_or_path=str(directory))).fingerprint
    (directory / "training_args.bin").write_bytes(b"other")
    (directory / "consolidated.safetensors").write_bytes(b"other")
    moved = tmp_path / "moved"
    shutil.copytree(directory, moved)
    model = open_pretrained(ModelConfig(name_or_path=str(moved)))
    assert model.fingerprint == before
    assert model.source.files == tuple(Tensors(moved).files)


def test_other_weights_of_the_base_model_are_refused(tmp_path):
    model = open_pretrained(ModelConfig(name_or_path=str(base(tmp_path))))
    model.check(model.fingerprint, Path("run"))
    for other in (model.fingerprint[:-1] + "x", None):
        with pytest.raises(ValueError, match="must have the weights"):
            model.check(other, Path("run"))
