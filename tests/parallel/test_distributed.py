"""Runs of several processes: the losses of one, signals, kill -9, and other counts afterwards."""

import collections
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from tiers import fast
from training.runs import TRAIN

from bptjax.cli.train import main
from bptjax.run.checkpoint import Checkpoints
from bptjax.run.checkpoint_files import damage
from bptjax.run.metrics import read_metrics

TINY = """
device: cpu
model: {hidden_size: 16, num_layers: 1, num_heads: 2, attention_dropout: 0.1, residual_dropout: 0.1}
data: {packing: best_fit, eval_fraction: 0.1, num_shards: 2}
train: {max_steps: 24, seq_len: 32, per_device_train_batch_size: 2, eval_steps: 12}
optimizer: {learning_rate: 1.0e-2}
execution: {q_chunk: 16, k_chunk: 16, ffn_chunk: 16}
checkpoint: {save_steps: 6}
"""
LOST = "error: a peer process is lost: "
# Of a run killed at step 14, which may still have been writing what it saved at 12.
LAST_SAVED = re.compile("resumed at step (6|12) of 24")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Command line of the tiny run, without its run directory."""
    folder = tmp_path_factory.mktemp("tiny")
    texts = folder / "texts"
    (folder / "config.yaml").write_text(TINY.replace("data: {", f"data: {{path: {texts}, "))
    texts.mkdir()
    words = "the quick brown fox jumps over a lazy dog".split()
    rng = random.Random(0)
    for i in range(40):
        text = " ".join(rng.choices(words, k=rng.randrange(5, 60)))
        (texts / f"{i:02}.txt").write_text(text)
    return ["--config", str(folder / "config.yaml")]


def alone(devices, *command):
    """The run in this process, on so many devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "bptjax.training.setup.select_devices", lambda device: jax.devices()[:devices]
        )
        return main([*command])


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """The run in one process with four devices."""
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    assert alone(4, *arguments, "--run_dir", str(run_dir)) == 0
    return run_dir


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def start():
    """Starts a command in two processes with two devices each; they do not outlive the test."""
    started = []

    def start(*command, secrets=("", "")):
        start.port = free_port()
        flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
        flags = " ".join([*flags, "--xla_force_host_platform_device_count=2"])
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(start.port), "WORLD_SIZE": "2"}
        pair = [
            subprocess.Popen(
                [sys.executable, *command],
                env=os.environ
                | where
                | {"RANK": rank, "XLA_FLAGS": flags, "BPTJAX_SECRET": secrets[int(rank)]},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in "01"
        ]
        started.extend(pair)
        return pair

    yield start
    for process in started:
        for child in children(process):
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


def children(process):
    """Process ids of the children; none of a process that has ended."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def ends(processes):
    """Their exit codes, what they said on stdout, and the lines of stderr that tell an error."""
    said = [process.communicate(timeout=300) for process in processes]
    errors = [[x for x in err.splitlines() if x.startswith("error")] for _, err in said]
    return [process.returncode for process in processes], [out for out, _ in said], errors


@contextmanager
def strangers(port):
    """Connects to the port again and again: sends garbage, the start of a gRPC connection, half a
    greeting or nothing; closes, resets or keeps the connection."""
    done, kept, count = threading.Event(), collections.deque(), itertools.count()
    greetings = os.urandom(5000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b"bptjax 1", b""

    def bother():
        while not done.wait(0.02):
            try:
                connection = socket.create_connection(("localhost", port))
            except OSError:
                continue
            number = next(count)
            with suppress(OSError):
                connection.sendall(greetings[number % 4])
            if number % 3 == 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if number % 3 == 2:
                kept.append(connection)
                connection = kept.popleft() if len(kept) > 30 else None
            if connection is not None:
                connection.close()

    thread = threading.Thread(target=bother)
    thread.start()
    yield count
    done.set()
    thread.join()
    for connection in kept:
        connection.close()


def losses(run_dir):
    return {
        (record["step"], name): record[name]
        for record in read_metrics(run_dir / "metrics.jsonl")
        for name in ("train/loss", "eval/loss", "train/tokens_seen")
        if name in record
    }


def strike(pair, number, victim, run_dir, step, send=subprocess.Popen.send_signal):
    """Sends the signal to one of the pair when `step` is done."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and pair[0].poll() is pair[1].poll() is None:
        if (run_dir / "metrics.jsonl").exists() and max(losses(run_dir), default=(0,))[0] >= step:
            break
        time.sleep(0.02)
    send(pair[victim], number)


SUPERVISED = """
import sys
from bptjax.run.supervise import supervise
sys.exit(supervise([sys.executable, *sys.argv[1:]]))
"""


@pytest.mark.thorough
def test_the_first_killed_under_supervision(arguments, tmp_path, start):
    """Each process has a supervisor, which restarts it: metrics and the last state are, bit for
    bit, those of two undisturbed processes, while strangers connect to the first. Both roll back
    after small spikes. The disturbed run writes checkpoints to a local directory first."""
    command = [*TRAIN, *arguments, "--train.on_spike.max_rollbacks=19", "--data.seed=1"]
    command += ["--train.on_spike.factor=1.03", "--train.on_spike.window=3", "--run_dir"]
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "run"
    codes, _, errors = ends(start(*command, str(undisturbed)))
    assert codes == [0, 0], errors
    local = f"--checkpoint.local_dir={tmp_path / 'fast'}"
    pair = start("-c", SUPERVISED, *command, str(run_dir), local)

    def send(supervisor, number):
        (child,) = children(supervisor)
        os.kill(child, number)

    strike(pair, signal.SIGKILL, 0, run_dir, 14, send)
    with strangers(start.port) as count:
        codes, (said, silent), errors = ends(pair)
    assert codes == [0, 0] and next(count) > 50, errors
    assert LAST_SAVED.search(said) and "step" not in silent
    assert errors[0] == [] and len(errors[1]) == 1 and errors[1][0].startswith(LOST)
    log = (run_dir / "log.txt").read_text()
    assert log.count("supervisor: restarting after ") == 2
    assert "killed by SIGKILL" in log and "after exit code 1: a peer process is lost: " in log
    assert losses(run_dir) == losses(undisturbed)
    assert "rolling back to step 6, " in log and "rolling back to step 12, " in log
    first, second = (Checkpoints(directory) for directory in (run_dir, undisturbed))
    for name in second.specs(24):
        np.testing.assert_array_equal(first.read(24, name), second.read(24, name), strict=True)


@pytest.mark.thorough
def test_the_second_killed_and_other_counts(arguments, whole, tmp_path, start, capsys):
    """Two processes that share all rows; then one with eight devices, and one with one."""
    run_dir = tmp_path / "run"
    command = [*arguments, "--run_dir", str(run_dir), "--train.per_device_train_batch_size"]
    kill(start(*TRAIN, *command, "8", "--parallel.sp", "4"), 1, run_dir)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(17, patch)
        assert alone(8, *command, "1") == 143
    assert alone(1, *command, "8") == 0
    said = capsys.readouterr().out
    assert LAST_SAVED.search(said) and "resumed at step 18" in said
    assert losses(run_dir) == pytest.approx(losses(whole), rel=1e-6, abs=0)


def kill(pair, victim, run_dir):
    """Kills one at step 14, and sees the other end; what they had told."""
    strike(pair, signal.SIGKILL, victim, run_dir, 14)
    struck = time.monotonic()
    codes, _, errors = ends(pair)
    assert time.monotonic() - struck < 30
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1
    assert len(errors[1 - victim]) == 1 and errors[1 - victim][0].startswith(LOST)
    return losses(run_dir)


@pytest.mark.thorough
def test_a_signal_to_one_stops_all_at_one_step(arguments, whole, tmp_path, start):
    """After a step that is profiled, which changes no loss. Checkpoints come from local
    directories."""
    run_dir = tmp_path / "run"
    local = f"--checkpoint.local_dir={tmp_path / 'fast'}"
    pair = start(*TRAIN, *arguments, "--run_dir", str(run_dir), "--profile", local)
    strike(pair, signal.SIGTERM, 1, run_dir, 7)
    codes, (said, silent), errors = ends(pair)
    assert codes == [143, 143] and not any(errors)
    assert "Time of a step, ms" in said and "warning" not in said
    assert "Time of a step" not in silent and "warning" not in silent
    assert len(list((run_dir / "profile" / "trace").rglob("*.xplane.pb"))) == 1
    told = losses(run_dir)
    names = [p.name for p in (run_dir / "checkpoints").iterdir()]
    assert max(int(name) for name in names if name.isdecimal()) == max(told)[0] < 24
    assert ".local" in names and not list((tmp_path / "fast").iterdir())
    wanted = losses(whole)
    assert told == pytest.approx({at: wanted[at] for at in told}, rel=1e-6, abs=0)


def stop_at(step, patch):
    from bptjax.run.metrics import JsonlWriter

    write = JsonlWriter.write

    def signalled(self, at, metrics):
        write(self, at, metrics)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(JsonlWriter, "write", signalled)


@pytest.mark.thorough
def test_another_global_batch_size_is_refused(arguments, whole, capsys):
    assert alone(2, *arguments, "--run_dir", str(whole)) == 2
    assert "has 8, this run 4; keep per_device_train_batch_size" in capsys.readouterr().err


JOINED = """
import time
from contextlib import ExitStack
from bptjax.parallel import distributed
from bptjax.parallel.mesh import ParallelConfig
distributed.REPORT_TIMEOUT_S = distributed.CLEANUP_TIMEOUT_S = 1
distributed.initialize(ParallelConfig())
print("joined", flush=True)
"""


@pytest.mark.parametrize("victim", fast([0, 1], [1]))
def test_a_lost_peer_ends_blocked_processes(start, victim):
    """As a collective of GPUs would be."""
    pair = start("-c", JOINED + "time.sleep(120)")
    assert [process.stdout.readline() for process in pair] == ["joined\n", "joined\n"]
    pair[victim].kill()
    codes, _, errors = ends(pair)
    assert codes[1 - victim] == 1 and errors[1 - victim][0].startswith(LOST)


@pytest.mark.thorough
def test_unknown_connections_are_ignored(start):
    """One that came before all had joined, and one after."""
    before = """
import os, socket, time
def connect():
    return socket.create_connection(("localhost", int(os.environ["MASTER_PORT"])))
early = None
while early is None and os.environ["RANK"] == "1":
    try:
        early = connect()
    except OSError:
        time.sleep(0.05)
"""
    after = """
if early:
    early.close()
connect().close()
time.sleep(2)
distributed.shutdown()
"""
    codes, _, errors = ends(start("-c", before + JOINED + after))
    assert codes == [0, 0] and not any(errors)


@pytest.mark.thorough
def test_another_secret_is_refused(start):
    """In one line of the process that joins; it sends nothing else to the port."""
    pair = start("-c", JOINED, secrets=("one", "another"))
    _, error = pair[1].communicate(timeout=60)
    assert pair[1].returncode == 2
    assert re.fullmatch(
        r"error: parallel.coordinator=localhost:\d+: must be process 0 with the secret of this "
        r"process; set BPTJAX_SECRET to the same text in all processes\n",
        error,
    )
    assert pair[0].poll() is None


@pytest.mark.thorough
def test_other_versions_in_one_process_are_refused(start):
    code = """
import os
from bptjax.run import versions
real = versions.installed
versions.installed = lambda name: os.environ["RANK"] if name == "tokenizers" else real(name)
"""
    message = "process 1: must have the same versions as process 0, tokenizers 0 instead of 1"
    for process in start("-c", code + JOINED):
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1 and error.endswith(f"ValueError: {message}\n")


SEVERAL = """
import threading
from bptjax.parallel import distributed
together = threading.Barrier(8)
def end():
    together.wait()
    distributed.exit_with(distributed.PeerLost("the same host"))
for _ in range(7):
    threading.Thread(target=end).start()
end()
"""


@pytest.mark.parametrize("trial", fast(range(3), [0]))
def test_threads_that_notice_the_same_lost_peer_print_one_line(trial):
    ended = subprocess.run([sys.executable, "-c", SEVERAL], capture_output=True, text=True)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1 and "the same host" in ended.stderr


@pytest.mark.thorough
def test_a_failure_does_not_wait_long_for_the_others(start):
    code = """
with ExitStack() as stack:
    stack.callback(time.sleep, 120)
    stack.push(distributed.exit_after_timeout)
    raise ValueError("no more ink")
"""
    codes, _, errors = ends(start("-c", JOINED + code))
    assert 1 in codes and ["error: no more ink"] in errors


@pytest.mark.thorough
def test_processes_that_do_not_connect_time_out(start):
    code = JOINED.replace("REPORT", "INIT")
    code = code.replace("Config()", "Config(num_processes=3)")
    codes, _, errors = ends(start("-c", code))
    assert codes == [1, 1]
    for rank in (0, 1):
        assert f"process {rank} of 3 has waited 1 s for the other processes" in errors[rank][0]


@pytest.mark.thorough
def test_another_config_in_one_process_is_refused(arguments, tmp_path, start):
    """Before the run directory is made."""
    run_dir = tmp_path / "run"
    code = (
        "import os, sys; from bptjax.cli.train import main; "
        "sys.exit(main([*sys.argv[1:], '--seed', os.environ['RANK']]))"
    )
    codes, _, errors = ends(start("-c", code, *arguments, "--run_dir", str(run_dir)))
    assert codes == [2, 2]
    for error in errors:
        assert error == ["error: process 1: must have the same config and data as process 0"]
    assert not run_dir.exists()


@pytest.mark.thorough
def test_a_full_disk_of_one_process_ends_all(arguments, tmp_path, start):
    """Its part of a save fails while the other process waits for it at a barrier."""
    code = """
import os, resource, sys
from bptjax.cli.train import main
if os.environ["RANK"] == "1":
    sys.dont_write_bytecode = True  # Python does not notice that such a file is cut off.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
sys.exit(main())
"""
    run_dir = tmp_path / "run"
    codes, _, errors = ends(start("-c", code, *arguments, "--run_dir", str(run_dir)))
    assert codes == [1, 1] and errors[0][0].startswith(LOST)
    full = f"error: process 1: {run_dir}/checkpoints/6: File too large; free some space, "
    assert len(errors[1]) == 1 and errors[1][0].startswith(full)


@pytest.mark.thorough
def test_one_process_can_read_a_checkpoint_alone(start, tmp_path):
    """As each process does that starts from another run."""
    code = """
import sys
import jax
import numpy as np
from jax.sharding import PartitionSpec
from bptjax.run.checkpoint import Checkpoints
from bptjax.parallel.mesh import make_mesh, select_devices
mesh = make_mesh(ParallelConfig(), select_devices("cpu"))
where = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp"))
x = np.arange(8)
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"x": jax.make_array_from_callback(x.shape, where, x.__getitem__)}, {})
checkpoints.wait()
if jax.process_index() == 0:
    print(checkpoints.read(1, "x"))
checkpoints.close()
distributed.shutdown()
"""
    codes, said, errors = ends(start("-c", JOINED + code, str(tmp_path)))
    assert codes == [0, 0] and not any(errors)
    assert said[0].endswith("[0 1 2 3 4 5 6 7]\n")


LOCAL = """
import sys
from pathlib import Path
import jax
import numpy as np
from jax.sharding import PartitionSpec
from bptjax.parallel.distributed import all_gather_json, exit_with
from bptjax.parallel.mesh import make_mesh, select_devices
from bptjax.run.checkpoint import Checkpoints
from bptjax.run.local_checkpoints import local_directory, make_local_directory

mesh = make_mesh(ParallelConfig(), select_devices("cpu"))
shards = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp"))
copied = jax.sharding.NamedSharding(mesh, PartitionSpec())
rank, place, steps, kept = jax.process_index(), Path(sys.argv[1]), sys.argv[2], sys.argv[3]
where = str(place / f"fast{rank}"), place / "run", rank
make_local_directory(*where)
checkpoints = Checkpoints(
    place / "run", save_total_limit=2, local=local_directory(*where), failed=exit_with,
    gather=all_gather_json,
)

def state(step):
    arrays = {"x": (np.arange(8.0) * step, shards), "y": (np.full(3, step), copied)}
    return {
        name: jax.make_array_from_callback(x.shape, place, x.__getitem__)
        for name, (x, place) in arrays.items()
    }

start = checkpoints.restore(state(0))
print("restored", start and start[0])
if start:
    wanted = state(start[0])
    for name, array in start[1].items():
        for found, other in zip(array.addressable_shards, wanted[name].addressable_shards):
            np.testing.assert_array_equal(found.data, other.data)
for step in map(int, steps.split()):
    if str(step) == kept:  # A killed process does not copy it.
        checkpoints.wait()
        checkpoints._copies._copy_next = lambda: None
    checkpoints.save(step, state(step), {"cursor": step})
checkpoints.close()
distributed.shutdown()
"""


@pytest.mark.thorough
def test_parts_in_a_local_directory_of_each_process(start, tmp_path):
    """Each directory is of one process alone. One process reads the checkpoint."""
    (tmp_path / "run").mkdir()
    final = tmp_path / "run" / "checkpoints"

    def run(steps, kept=""):
        codes, said, errors = ends(start("-c", JOINED + LOCAL, str(tmp_path), steps, kept))
        assert codes == [0, 0] and not any(errors)
        found = {text.split("restored ")[1].split()[0] for text in said}
        return found, sorted(p.name for p in final.iterdir() if p.name.isdecimal())

    fast = [tmp_path / f"fast{rank}" for rank in range(2)]
    assert run("1 2 3") == ({"None"}, ["2", "3"])
    assert not [x for path in fast for x in path.iterdir()]
    assert Checkpoints(tmp_path / "run").read(3, "x").tolist() == [3.0 * i for i in range(8)]
    assert run("4", kept="4") == ({"3"}, ["2", "3"])
    assert run("5 6", kept="6") == ({"4"}, ["4", "5"])
    shutil.rmtree(fast[1])  # A host is lost; another takes its place.
    assert run("7") == ({"5"}, ["5", "7"])
    assert not [x for path in fast for x in path.iterdir()]
    assert not damage(final / "7")
    assert Checkpoints(tmp_path / "run").read(7, "y").tolist() == [7, 7, 7]


@pytest.mark.thorough
def test_an_error_of_one_process_ends_all(arguments, tmp_path, start):
    """Here the shard that it alone reads."""
    records = [{"text": "a" * 99}, {"prompt": "b" * 99, "answer": "c"}] * 2
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    data = ["--data.path", str(tmp_path / "texts.jsonl"), "--data.eval_fraction", "0"]
    run_dir = tmp_path / "run"
    command = [*TRAIN, *arguments, *data, "--run_dir", str(run_dir)]
    codes, _, errors = ends(start(*command))
    assert codes == [2, 2] and not run_dir.exists()
    message = (
        "the 2 documents in shard 1 of 2: all 2 records with tokens in the loss are longer than "
        "train.seq_len=32; "
    )
    assert errors[0][0].startswith(f"error: process 1: {message}")
    assert errors[1][0].startswith(f"error: {message}")
    assert [len(said) for said in errors] == [1, 1]


GATHERED = """
import jax
from bptjax.config import Config, TrainConfig
from bptjax.weights.lora import AdapterConfig
from bptjax.models.config import ModelConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh, select_devices
from bptjax.training.spec import TrainSpec
from bptjax.training.state import gather_adapters, init_state

def gathered(devices):
    # Whether the embedding is sharded; a and b of a kernel, and the embedding.
    model = ModelConfig(vocab_size=8, hidden_size=16, num_layers=1, num_heads=2)
    adapter = AdapterConfig("lora", target_modules=["query"], modules_to_save=["embedding"])
    config = Config(model=model, train=TrainConfig(max_steps=1), adapter=adapter)
    config = config.on("cpu")
    spec = TrainSpec(config, model, make_mesh(ParallelConfig(), devices))
    state = init_state(spec)
    sharded = not state.model.embedding.get_value().is_fully_replicated
    found = gather_adapters(spec, state)
    (a, b, _), embedding = found.values["layers.query.kernel"], found.modules["embedding"]
    return sharded, [x.tobytes().hex() for x in (a, b, embedding)]
"""


@pytest.mark.thorough
def test_adapters_are_gathered_from_all_processes(start):
    code = (
        GATHERED
        + """
for part in gathered(select_devices("cpu")):
    print(part)
distributed.shutdown()
"""
    )
    codes, said, errors = ends(start("-c", JOINED + code))
    assert codes == [0, 0], errors
    scope = {}
    exec(GATHERED, scope)
    _, wanted = scope["gathered"](jax.devices()[:1])
    for text in said:
        assert text.splitlines()[-2:] == ["True", str(wanted)]
