"""The notebook runs as it is, and holds no outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "first_hour.ipynb"


def cells():
    return [x for x in json.loads(NOTEBOOK.read_text())["cells"] if x["cell_type"] == "code"]


def test_the_notebook_holds_no_outputs():
    assert cells() and not any(cell["outputs"] or cell["execution_count"] for cell in cells())


@pytest.mark.thorough
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """On few steps: the model is not yet good."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    for cell in cells():
        source = "".join(cell["source"]).replace("STEPS = 200", "STEPS = 20")
        exec(compile(source, cell["id"], "exec"), names)
    out = capsys.readouterr().out
    assert '"content": ' in out and "step 20: eval/loss " in out and ", reference '" in out
    assert "'README.md', 'bptjax_tokenizer.json', 'config.json', 'model.safetensors'" in out
    assert (tmp_path / "first_hour" / "run" / "report.html").exists()
