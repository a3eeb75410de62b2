"""Small files of others that expand to much memory or time end a command with one line."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiers import fast

from bptjax.config import Config, to_yaml
from bptjax.run.yaml_files import read_yaml
from bptjax.weights.hf.peft_config import adapter_settings, rank_and_scale

# A command in a process of bounded memory, beyond the memory of its libraries.
COMMAND = """
import resource, sys
import jax, bptjax.cli.preview, bptjax.data.text
from bptjax.cli.main import main
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]),) * 2)
code = main(sys.argv[2:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def refused(argv, memory=2**31, seconds=60):
    """The line that a command prints, which may take an amount of memory and time only."""
    command = [sys.executable, "-c", COMMAND, str(memory), *map(str, argv)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
    print(done.stdout[-100:])
    error = done.stderr.removeprefix("starting: loading libraries\n")
    assert done.returncode == 2 and error.count("\n") == 1, done.stderr
    return error


def repeated(value, count):
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


def messages(text, count):
    roles, texts = repeated("assistant", count), repeated(text, count)
    inner = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), inner)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["text", "messages", "input_ids"])
def test_a_small_parquet_file_of_much_data(tmp_path, kind):
    """The same text 6,144 times, in records or in one record, and 1.25 GiB of token ids."""
    file = tmp_path / "data.parquet"
    if kind == "input_ids":
        with pq.ParquetWriter(file, pa.schema({kind: pa.list_(pa.int32())})) as writer:
            ids = pa.array([7] * 2**20, pa.int32())
            row = pa.ListArray.from_arrays(pa.array([0, 2**20], pa.int32()), ids)
            batch = pa.RecordBatch.from_arrays(
                [pa.chunked_array([row] * 320).combine_chunks()], [kind]
            )
            writer.write_batch(batch)
    else:
        make = {"text": repeated, "messages": messages}[kind]
        table = pa.table({kind: make("x" * 2**20, 6144)})
        pq.write_table(table, file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 10_000_000
    line = refused(["preview", f"--data.path={file}", "--data.format=auto"])
    assert f"{file}, row group 0: must expand to at most 1,073,741,824 bytes" in line


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.zst", "a.json.gz"])
def test_a_small_compressed_file_of_one_long_line(tmp_path, name):
    file = tmp_path / name
    codec = {"zst": "zstd", "gz": "gzip"}[name.rpartition(".")[2]]
    with pa.output_stream(str(file), compression=codec) as stream:
        stream.write(b'["')
        for _ in range(3 * 256 if codec == "zstd" else 64):
            stream.write(b"a" * 2**22)
        stream.write(b'"]')
    line = refused(["preview", f"--data.path={file}"])
    rule = "must expand to at most the larger of 100 times its size and 67,108,864 bytes"
    assert f"{file}: {rule}" in line


OFFSETS = pa.py_buffer(np.array([0, 2**30, 5], np.int32).tobytes())
DAMAGED = {
    "offset": pa.Array.from_buffers(pa.string(), 2, [None, OFFSETS, pa.py_buffer(b"texts")]),
    "index": pa.DictionaryArray.from_arrays(pa.array([2**30]), pa.array(["a"]), safe=False),
}


@pytest.mark.parametrize("name", fast(DAMAGED, ["offset"]))
@pytest.mark.parametrize("bad_records", fast(["error", "skip"], ["skip"]))
def test_an_arrow_file_that_points_beyond_its_end(tmp_path, name, bad_records):
    """pyarrow would follow an offset, and end the process by SIGBUS or read other memory."""
    file, table = tmp_path / "a.arrow", pa.table({"text": DAMAGED[name]})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    line = refused(["preview", f"--data.path={file}", f"--data.bad_records={bad_records}"])
    assert f"{file}, row group 0: must be valid Arrow data (" in line


def bomb(levels=9):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]")
    return "\n".join(lines) + "\n"


@pytest.mark.thorough
def test_aliases_of_a_run_are_counted(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(Config()) + bomb())
    data = tmp_path / "text.txt"
    data.write_text("text " * 100)
    for argv in (
        ["train", f"--run_dir={run}", f"--data.path={data}", "--device=cpu"],
        ["train", f"--config={run / 'config.yaml'}"],
        ["generate", "--model", run, "--prompt", "a"],
    ):
        line = refused(argv)
        assert "config.yaml" in line and "must have at most 100,000 values" in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a {<<: *a}", "line 1: must not contain itself|found undefined alias"),
        ("a: &a [*a]", "line 1: must not contain itself"),
        ("a: " + "[" * 5000, "must not be nested so deeply"),
        ("a: b\n" * 300_000, "must have at most 1,048,576 bytes"),
        ("1: 2", "line 1: each key must be text"),
        ("a: {null: 2}", "line 1: each key must be text"),
        ("a: !!python/name:os.system", "line 1: .* must be of the type python/name:os.system"),
        ("b: 1\na: !!timestamp x", "line 2: .x.: must be of the type timestamp"),
        ("a: !!bool x", "line 1: .x.: must be of the type bool"),
        ("a: !!float x", "line 1: .x.: must be of the type float"),
        ("a: [2001-13-45]", "line 1: .2001-13-45.: must be of the type timestamp"),
        ("a: " + "9" * 5000, "line 1: .9*.: must be of the type int, of at most 4,300 digits"),
        ("a: =", "line 1: .=.: must be of the type value"),
        ("[a]", "must hold keys with values"),
        ("a: \xff", "must be in UTF-8"),
    ],
)
def test_yaml_is_bounded(tmp_path, text, reason):
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=reason):
        read_yaml(file)


def test_aliases_within_the_bound_are_read(tmp_path):
    text = bomb(4) + "b: &b {c: 1}\nd: {<<: *b, e: 2}\n"
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)


ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q"]}


def test_patterns_of_an_adapter_take_linear_time(tmp_path):
    """2^60 steps with Python's `re`."""
    raw = ADAPTER | {"rank_pattern": {"(a+)+b": 4, "layers.[01].*": 2}}
    assert adapter_settings(raw, tmp_path)["r"] == 8
    assert rank_and_scale(raw, "x." + "a" * 60) == (8, 1)
    assert rank_and_scale(raw, "aab") == (4, 2)
    assert rank_and_scale(raw, "model.layers.1.q") == rank_and_scale(raw, "layers.0.q") == (2, 4)


@pytest.mark.parametrize("value", [True, -1, 1e308, "embed_tokens", {"a": 1}, [3], [[]]])
def test_modules_to_save_are_names(tmp_path, value):
    """A number ended in a traceback."""
    with pytest.raises(ValueError, match="modules_to_save=.* is not supported"):
        adapter_settings(ADAPTER | {"modules_to_save": value}, tmp_path)


@pytest.mark.parametrize(
    "patterns", [["(?=a)b"], ["a" * 999 + "()"], [f"a{n}*" for n in range(101)]]
)
def test_patterns_beyond_the_bounds_are_refused(tmp_path, patterns):
    with pytest.raises(ValueError, match="rank_pattern=.* is not supported"):
        adapter_settings(ADAPTER | {"rank_pattern": dict.fromkeys(patterns, 4)}, tmp_path)
