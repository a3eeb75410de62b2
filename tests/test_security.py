"""The promises of docs/security.md: no code of a checkpoint, no file outside its directory, private
files."""

import json
import os
import pickle

import pytest
from chats import loaded, raw_tokenizer
from hf.conftest import llama  # noqa: F401

from bptjax import convert
from bptjax.data.tokenizer import load_tokenizer
from bptjax.models.config import ModelConfig
from bptjax.pretrained import open_pretrained

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
    from bptjax.convert import difference
    from bptjax.pretrained import Pretrained

    directory = llama()
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"architectures": ["pipeline"]}))
    model = Pretrained(ModelConfig(causal=False, vocab_size=8), source=None)
    with pytest.raises(ValueError, match="architectures: must name a model, not 'pipeline'"):
        difference(directory, model)
