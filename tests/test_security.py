"""The promises of docs/security.md: no code of a checkpoint, no file outside its directory, private
files."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from chats import TALK, loaded, raw_tokenizer
from weights.hf.conftest import llama  # noqa: F401

from bptjax.cli import convert, train
from bptjax.data.tokenizer import load_tokenizer
from bptjax.models.config import ModelConfig
from bptjax.parallel.mesh import make_cache_directory
from bptjax.run.checkpoint_files import damage
from bptjax.run.links import check_links
from bptjax.run.output import atomic_directory, replaced_files, write_atomically
from bptjax.weights.pretrained import open_pretrained

CODE = "import pathlib\npathlib.Path({!r}).touch()\nclass C:\n    pass\n"


@pytest.fixture
def touched(tmp_path):
    """A file that code of a checkpoint would make."""
    file = tmp_path / "touched"
    yield file
    assert not file.exists()


def test_code_beside_a_config_is_not_run(llama, tmp_path, touched, capsys):  # noqa: F811
    directory = llama()
    (directory / "code.py").write_text(CODE.format(str(touched)))
    raw = json.loads((directory / "config.json").read_text())
    for kind in ("llama", "stranger"):
        names = {name: "code.C" for name in ("AutoConfig", "AutoModelForCausalLM")}
        own = raw | {"auto_map": names, "model_type": kind}
        (directory / "config.json").write_text(json.dumps(own))
        found = convert.main(["hf-to-bptjax", str(directory), str(tmp_path / kind)])
        assert found == (0 if kind == "llama" else 2)
        assert "Traceback" not in capsys.readouterr().err


def test_code_beside_a_tokenizer_is_not_run(tmp_path, touched):
    directory = tmp_path / "tokenizer"
    loaded(raw_tokenizer("bytes"), directory)
    (directory / "code.py").write_text(CODE.format(str(touched)))
    file = directory / "tokenizer_config.json"
    raw = json.loads(file.read_text())
    for kind in ("PreTrainedTokenizerFast", "C"):
        own = {"auto_map": {"AutoTokenizer": ["code.C", "code.C"]}, "tokenizer_class": kind}
        file.write_text(json.dumps(raw | own))
        try:
            assert load_tokenizer(directory).decode([5]) != ""
        except ValueError as error:
            assert "must hold a Hugging Face tokenizer" in str(error)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "start", [["-m", "bptjax"], ["-c", "import sys, bptjax.cli.main as c; sys.exit(c.main())"]]
)
@pytest.mark.parametrize("flags", [[], ["--supervise"]])
def test_modules_in_the_current_directory_are_not_imported(tmp_path, touched, start, flags):
    """By the run, by the child of its supervisor, or by the process of the chat templates."""
    model = tmp_path / "model"
    loaded(raw_tokenizer("bytes", "{{ raise_exception('rendered and refused') }}"), model)
    for name in ("yaml", "jsonargparse", "transformers", "numpy", "jinja2"):
        (model / f"{name}.py").write_text(CODE.format(str(touched)))
    line = json.dumps({"messages": TALK}) + "\n"
    (model / "chats.jsonl").write_text(line * 9)
    command = [sys.executable, *start, "train", *flags, "--data.path=chats.jsonl", "--device=cpu"]
    command += ["--data.tokenizer=.", "--run_dir=run", "--data.eval_fraction=0"]
    if start[0] == "-c":  # As the script that pip installs.
        command[1:1] = ["-P"]
    environment = os.environ | {"PYTHONPATH": str(Path(train.__file__).parents[2])}
    done = subprocess.run(command, cwd=model, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "rendered and refused" in done.stderr, done.stderr


class Touch:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_a_pickle_is_not_run(llama, touched):  # noqa: F811
    torch = pytest.importorskip("torch")
    directory = llama()
    (directory / "model.safetensors").unlink()
    file = directory / "pytorch_model.bin"
    for write in (lambda x: file.write_bytes(pickle.dumps(x)), lambda x: torch.save(x, file)):
        write({"a": Touch(touched)})
        with pytest.raises(ValueError, match="pytorch_model.bin is damaged or not a torch file"):
            open_pretrained(ModelConfig(name_or_path=str(directory)))


def test_a_class_that_is_no_model_is_not_called(llama, tmp_path, capsys):  # noqa: F811
    pytest.importorskip("torch")
    from bptjax.weights.pretrained import Pretrained
    from bptjax.weights.verification import difference

    directory = llama()
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"architectures": ["pipeline"]}))
    model = Pretrained(ModelConfig(causal=False, vocab_size=8), source=None)
    with pytest.raises(ValueError, match="architectures: must name a model, not 'pipeline'"):
        difference(directory, model)


@pytest.mark.parametrize("key", ["fast_tokenizer_files", "merges_file", "gguf_file", "vocab"])
def test_names_out_of_a_tokenizers_directory_are_refused(tmp_path, key):
    directory = tmp_path / "tokenizer"
    loaded(raw_tokenizer("bytes"), directory)
    file = directory / "tokenizer_config.json"
    raw = json.loads(file.read_text())
    (directory / "tokenizer.json").rename(tmp_path / "tokenizer.4.0.json")
    for name in ("../tokenizer.4.0.json", str(tmp_path / "tokenizer.4.0.json")):
        value = [name] if key.endswith("s") else name
        for tree in ({key: value}, {"init_kwargs": [{key: value}]}):
            file.write_text(json.dumps(raw | tree))
            with pytest.raises(
                ValueError, match=f"_config.json: {key}='.*must not name {tmp_path}"
            ):
                load_tokenizer(directory)
    (tmp_path / "tokenizer.4.0.json").rename(directory / "tokenizer.json")
    # A path of its author's machine.
    file.write_text(json.dumps(raw | {"tokenizer_file": "/none/tokenizer.json"}))
    assert load_tokenizer(directory).vocab_size


@pytest.mark.parametrize(
    "name", ["config.json", "additional_chat_templates/a", "hf/a", "profile/a"]
)
def test_pipes_in_a_directory_are_refused(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{path}: must be a file or a directory"):
        check_links(tmp_path)


def linked(path, target):
    """Makes `path` a link; what was there becomes the target, unless there is a target."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "preprocessor_config.json",
        "generation_config.json",
        "additional_chat_templates/tool.jinja",
        "hf",
    ],
)
def test_links_out_of_a_model_directory_are_refused(llama, tmp_path, capsys, name):  # noqa: F811
    directory = llama()
    (tmp_path / "secret").write_text("{}")
    found = (directory / name).exists()
    linked(directory / name, tmp_path / ("moved" if found else "secret"))
    assert convert.main(["hf-to-bptjax", str(directory), str(tmp_path / "out")]) == 2
    assert f"{directory / name}: must not link to {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="must not link to"):
        load_tokenizer(directory)


def test_links_of_the_hubs_cache_are_followed_within_its_entry(llama, tmp_path):  # noqa: F811
    entry = tmp_path / "models--owner--name"
    snapshot = entry / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    llama().rename(entry / "blobs")
    for file in (entry / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (tmp_path / "model").symlink_to(snapshot)  # The user's own name for it.
    for name in (snapshot, tmp_path / "model"):
        assert open_pretrained(ModelConfig(name_or_path=str(name))).config.num_layers == 2
    inner = snapshot / "epoch-1"  # A subdirectory of the repository, as of an adapter.
    inner.mkdir()
    for file in (entry / "blobs").iterdir():
        (inner / file.name).symlink_to(f"../../../blobs/{file.name}")
    assert open_pretrained(ModelConfig(name_or_path=str(inner))).config.num_layers == 2
    other = tmp_path / "models--owner--other" / "blobs" / "x"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    (snapshot / "x.json").symlink_to(other)
    with pytest.raises(ValueError, match="must not link to .*models--owner--other"):
        open_pretrained(ModelConfig(name_or_path=str(snapshot)))


@pytest.mark.parametrize(
    "name",
    ["log.txt", "hf/config.json", "checkpoints/3", "checkpoints/3/x", "profile/a/x", "stacks"],
)
def test_links_out_of_a_run_are_refused(tmp_path, capsys, name):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "text.txt").write_text("some text " * 50)
    run = tmp_path / "run"
    run.mkdir()
    linked(run / name, tmp_path / "secret")
    argv = [f"--run_dir={run}", f"--data.path={tmp_path / 'text.txt'}", "--device=cpu"]
    assert train.main(argv) == 2
    assert f"{run / name}: must not link to {tmp_path / 'secret'}" in capsys.readouterr().err
    assert (tmp_path / "secret").read_text() == "secret"
    with pytest.raises(ValueError, match="must not link"):
        open_pretrained(ModelConfig(name_or_path=str(run)))


def test_links_that_lead_to_each_other_end(tmp_path):
    for name in ("hf", "checkpoints"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").symlink_to(tmp_path)
        (tmp_path / name / "b").symlink_to("b")
    check_links(tmp_path)


def test_a_manifest_lists_no_files_elsewhere(tmp_path):
    for name in ("../x", "/dev/zero"):
        (tmp_path / "manifest.json").write_text(json.dumps({name: 0}))
        assert damage(tmp_path) == "manifest.json lists files elsewhere"


def test_a_planted_link_is_not_written_through(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / f".a.{os.getpid()}.tmp").symlink_to(tmp_path / "secret")
    write_atomically(tmp_path / "a", "new")
    assert (tmp_path / "secret").read_text() == "secret" and (tmp_path / "a").read_text() == "new"


def modes(directory):
    """Rights of others to the directory and to what is in it."""
    return {path.stat().st_mode & 0o077 for path in (directory, *directory.rglob("*"))}


@pytest.mark.parametrize(("umask", "wanted"), [(0o077, {0}), (0o027, {0o040, 0o050})])
def test_results_follow_the_umask(tmp_path, umask, wanted):
    before = os.umask(umask)
    try:
        with atomic_directory(tmp_path / "out") as directory:
            write_atomically(directory / "inner" / "a", "a")
        with replaced_files(tmp_path / "out") as directory:
            (directory / "b").write_text("b")
    finally:
        os.umask(before)
    assert modes(tmp_path / "out") == wanted


def test_the_cache_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    make_cache_directory()
    assert modes(tmp_path / "new" / "bptjax") == {0}
    (tmp_path / "new" / "bptjax").chmod(0o775)
    make_cache_directory()
    assert modes(tmp_path / "new" / "bptjax") == {0}
