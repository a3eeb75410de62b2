"""The model card of exports, and their upload to the hub, at the boundary of its API."""

import json

import jax
import pytest
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled

from bptjax.cli import convert
from bptjax.cli.train import main
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.weights.model_card import write_card
from weights.hf.cases import config as hf_config
from weights.hf.loading import random_base


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that trained an adapter for two steps, evaluated twice."""
    directory = tmp_path_factory.mktemp("card")
    raw = hf_config("llama")
    raw.vocab_size = ByteTokenizer.vocab_size
    ByteTokenizer().save(random_base(directory / "base", raw))
    (directory / "text.txt").write_text("\n".join(f"{i} plus one is {i + 1}." for i in range(50)))
    options = {
        "run_dir": directory / "run",
        "device": "cpu",
        "model.name_or_path": directory / "base",
        "data.path": directory / "text.txt",
        "data.eval_path": directory / "text.txt",
        "adapter.type": "lora",
        "adapter.r": 2,
        "train.max_steps": 2,
        "train.seq_len": 16,
        "optimizer.learning_rate": 0.001,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
        assert main([f"--{key}={value}" for key, value in options.items()]) == 0
    return directory / "run"


def parts(card):
    """Returns the metadata and the text of a card."""
    _, head, text = card.read_text().split("---\n", 2)
    return yaml.safe_load(head), text


@pytest.mark.thorough
def test_the_card_tells_base_data_settings_and_evaluation(run, tmp_path):
    head, text = parts(run / "adapter" / "README.md")
    # A directory is no base model that the hub would know.
    assert head == {"library_name": "peft", "tags": ["bptjax"]}
    assert text.startswith("\n# run\n\nAn adapter for base, with bptjax ")
    facts = json.loads((run / "run.json").read_text())
    assert facts["results"][0] in text and facts["results"][0].startswith("held-out")
    assert "training data: 1 records, " in text and str(run.parent) not in text
    assert "| `data.path` | `text.txt` |" in text and "run_dir" not in text
    assert "| `adapter.r` | `2` |" in text and "| `adapter.type` | `lora` |" in text
    assert "| 0 | eval/loss | " in text and "| 2 | eval/loss | " in text
    assert "## License\n\nNot chosen yet" in text
    for conversion, library in (("export-adapter", "peft"), ("merge-adapter", "transformers")):
        out = tmp_path / conversion
        assert convert.main([conversion, str(run), str(out)]) == 0
        head, own = parts(out / "README.md")
        assert head["library_name"] == library and own.startswith(f"\n# {conversion}\n\n")
        assert own.split("\n## ")[1:] == text.split("\n## ")[1:]


def test_the_card_of_a_hub_model_names_it(tmp_path):
    write_card(tmp_path, tmp_path, "mine", adapter=False, base="HuggingFaceTB/SmolLM2-135M")
    head, text = parts(tmp_path / "README.md")
    assert head["base_model"] == "HuggingFaceTB/SmolLM2-135M"
    assert "\n# mine\n\nTrained from HuggingFaceTB/SmolLM2-135M, with bptjax " in text
    assert "## Data" not in text and "## Settings" not in text


class Repo(str):
    repo_id = "ada/mine"


@pytest.fixture
def hub(monkeypatch):
    calls = []

    def create_repo(self, repo_id, **options):
        calls.append((repo_id, options))
        return Repo("https://huggingface.co/ada/mine")

    def upload_folder(self, *, repo_id, folder_path, **options):
        calls.append((repo_id, sorted(file.name for file in folder_path.iterdir())))

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return calls


@pytest.mark.thorough
def test_an_export_is_uploaded_to_a_private_repository(run, tmp_path, hub, capsys):
    command = ["export-adapter", str(run), str(tmp_path / "out"), "--push_to_hub", "mine"]
    assert convert.main(command) == 0
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert "README.md" in files and "adapter_model.safetensors" in files
    assert hub == [("mine", dict(private=True, exist_ok=True)), ("ada/mine", files)]
    assert "uploaded: https://huggingface.co/ada/mine\n" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "error",
    [OfflineModeIsEnabled("Cannot reach the hub: offline mode\nis enabled"), OSError("401 ...")],
    ids=["offline", "401"],
)
def test_an_upload_that_fails_keeps_the_export(run, tmp_path, hub, capsys, monkeypatch, error):
    def fail(self, repo_id, **options):
        raise error

    monkeypatch.setattr(HfApi, "create_repo", fail)
    out = tmp_path / "out"
    assert convert.main(["export-adapter", str(run), str(out), "--push_to_hub", "ada/mine"]) == 1
    line = capsys.readouterr().err
    reason = str(error).split("\n")[0]
    assert line.startswith(f"error: --push_to_hub=ada/mine: {out} is complete, but not uploaded (")
    assert reason in line and line.endswith(f"run `hf upload ada/mine {out}`\n")
    assert line.count("\n") == 1 and (out / "adapter_model.safetensors").exists() and not hub


@pytest.mark.thorough
def test_a_bad_name_is_refused_before_the_export(run, tmp_path, hub, capsys):
    out = tmp_path / "out"
    assert convert.main(["export-adapter", str(run), str(out), "--push_to_hub", "a b/c"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: --push_to_hub=a b/c: must be OWNER/NAME (")
    assert line.count("\n") == 1 and not out.exists() and not hub
