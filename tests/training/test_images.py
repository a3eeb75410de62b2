"""Runs on images: they learn, resume exactly on other meshes too, and are exported."""

import json
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from PIL import Image as pillow
from weights.hf.loading import random_weights

from bptjax.cli.convert import main as convert
from bptjax.cli.plan import open_spec
from bptjax.cli.preview import main as preview
from bptjax.cli.train import main
from bptjax.config import Config
from bptjax.data.check import DataCheck
from bptjax.data.config import DataConfig
from bptjax.data.images import Image, ImageProcessor, open_images
from bptjax.data.loader import data_check, eval_loader, train_loader
from bptjax.models.config import ModelConfig
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.objectives.classes import Classes
from bptjax.ops.patches import cut_patches
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.spec import TrainSpec, fit_to_images
from bptjax.training.step import abstract_batch, random_batch
from bptjax.weights.hf.config import read_config
from training.runs import rows, stop_at

COLORS = {"blue": (40, 60, 200), "green": (30, 180, 60), "red": (210, 50, 40)}
NAMES = list(COLORS)
SETTINGS = dict(image_processor_type="ViTImageProcessor", size=dict(height=16, width=16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A ViT without classes, images of three classes and of any size, and the config of a run."""
    from transformers import ViTConfig

    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    (folder / "base").mkdir()
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    raw = ViTConfig(**sizes, image_size=16, patch_size=4, hidden_dropout_prob=0.1)
    raw.architectures = ["ViTModel"]
    (folder / "base" / "config.json").write_text(raw.to_json_string())
    (folder / "base" / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    random_weights(folder / "base", *read_config(folder / "base"))
    for name, color in COLORS.items():
        (folder / "data" / name).mkdir(parents=True)
        for i in range(14):
            shape = *rng.integers(9, 40, 2), 3
            pixels = np.clip(rng.normal(color, 60, shape), 0, 255).astype(np.uint8)
            pillow.fromarray(pixels).save(folder / "data" / name / f"{i:02}.png")
    config = dict(
        device="cpu",
        model=dict(name_or_path=str(folder / "base")),
        data=dict(path=str(folder / "data")),
        train=dict(max_steps=24, per_device_train_batch_size=8, eval_steps=8),
        optimizer=dict(learning_rate=3e-3, warmup_steps=0),
        execution=dict(q_chunk=8, k_chunk=8, ffn_chunk=8),
        checkpoint=dict(save_steps=6),
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def train(folder, run, *flags):
    return main(["--config", str(folder / "config.yaml"), f"--run_dir={run}", *flags])


def processor(folder, size=(3, 16, 16)):
    return ImageProcessor(folder / "base", size, (4, 4), NAMES)


@pytest.mark.thorough
def test_a_run_learns_resumes_and_is_exported(folder, tmp_path, monkeypatch, capsys):
    whole, run, mesh, hf = (tmp_path / name for name in ("whole", "run", "mesh", "hf"))
    assert train(folder, whole) == 0
    assert rows(whole, "eval/accuracy")[24] == 1.0
    _, trained, held_out = open_images(DataConfig(str(folder / "data")))
    text = f"data: {len(trained)} images, {len(held_out)} held out, 3 classes"
    assert text in capsys.readouterr().out and len(trained) + len(held_out) == 42
    with monkeypatch.context() as patch:
        stop_at(9, signal.SIGTERM, patch)
        assert train(folder, run) == 143
    # A directory with another name is no class of the run.
    shutil.copytree(folder / "data", tmp_path / "data")
    (tmp_path / "data" / "red").rename(tmp_path / "data" / "rose")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert train(folder, run, "--data.path=data") == 2
    assert "data.path=data: must have the classes of the run in" in capsys.readouterr().err
    assert train(folder, run) == 0
    for name in ("train/loss", "train/accuracy", "train/grad_norm", "eval/loss", "eval/accuracy"):
        assert rows(run, name) == rows(whole, name)
    more = shutil.copy(folder / "data" / "red" / "00.png", folder / "data" / "red" / "14.png")
    assert train(folder, run) == 2
    more.unlink()
    assert "data: must be the 42 files of" in capsys.readouterr().err

    # Two devices have images, and two more each the other half of an image's tokens.
    flags = ["parallel.dp=2", "parallel.fsdp=1", "parallel.sp=2"]
    # A named kernel is tried on shapes alone first.
    flags += ["train.per_device_train_batch_size=4", "execution.attention_implementation=scan"]
    with monkeypatch.context() as patch:
        patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:4])
        assert train(folder, mesh, *(f"--{flag}" for flag in flags)) == 0
    for name in ("train/loss", "eval/loss"):
        got, wanted = (list(rows(x, name).values()) for x in (mesh, whole))
        np.testing.assert_allclose(got, wanted, rtol=1e-4)

    torch = pytest.importorskip("torch")
    import transformers

    assert convert(["bptjax-to-hf", str(run), str(hf)]) == 0
    model = transformers.ViTForImageClassification.from_pretrained(hf).eval()
    assert model.config.id2label == dict(enumerate(NAMES))
    theirs = transformers.ViTImageProcessorPil.from_pretrained(hf)
    images = [pillow.open(each.path) for each in held_out]
    labels = torch.tensor([NAMES.index(each.name) for each in held_out])
    with torch.no_grad():
        found = model(**theirs(images, return_tensors="pt"), labels=labels)
    np.testing.assert_allclose(rows(run, "eval/loss")[24], found.loss.item(), rtol=1e-5)

    # The export knows its classes, of which others than all may be trained further.
    shutil.rmtree(tmp_path / "data" / "rose")
    more = f"--model.name_or_path={hf}", f"--data.path={tmp_path / 'data'}"
    assert (
        train(folder, tmp_path / "more", *more, "--train.max_steps=null", "--train.epochs=0.3") == 0
    )
    # At most 26 of 28 images are not held out.
    assert max(rows(tmp_path / "more", "train/loss")) == 1
    assert rows(tmp_path / "more", "eval/accuracy")[0] == 1.0
    (tmp_path / "data" / "blue").rename(tmp_path / "data" / "sky")
    capsys.readouterr()
    assert train(folder, tmp_path / "other", *more) == 2
    assert "class 'sky': must be one of the 3 classes of" in capsys.readouterr().err


def test_images_of_any_mode_are_those_of_transformers(folder, tmp_path):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    theirs = ViTImageProcessorPil.from_pretrained(folder / "base")
    rng, own = np.random.default_rng(0), processor(folder)
    rgba = pillow.fromarray(rng.integers(0, 256, (21, 13, 4), dtype=np.uint8))
    rotated = pillow.Exif()
    rotated[0x0112] = 6  # A quarter turn.
    for mode in ("RGB", "L", "RGBA", "LA", "P", "1", "CMYK"):
        file = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
        (rgba.quantize(8) if mode == "P" else rgba.convert(mode)).save(file, exif=rotated)
        (example,) = own(Image(file, "red"))
        upright = pillow.open(file).convert("RGBA").convert("RGB")
        upright = upright.transpose(pillow.Transpose.ROTATE_270)
        wanted = theirs(upright, return_tensors="np")["pixel_values"][0].astype(np.float32)
        assert example["tokens"].shape == (17, 48) and example["tokens"].dtype == np.float32
        np.testing.assert_array_equal(example["tokens"][1:], cut_patches(wanted, (4, 4)), mode)
        assert example["labels"].tolist() == [2] + 16 * [-100]


def test_random_batches_have_the_shapes_of_a_run():
    model = ModelConfig(
        causal=False,
        encoder=EncoderConfig(image_size=(8, 12), patch_size=(4, 2), channels=1, classes=3),
    )
    config = fit_to_images(Config(model=model), model)
    assert config.train.seq_len == 13
    mesh = make_mesh(ParallelConfig(fsdp=1, sp=2), jax.devices()[:2])
    spec = TrainSpec(config, model, mesh)
    got, wanted = random_batch(spec), abstract_batch(spec)
    # Padded for the two devices of a sequence.
    assert got["tokens"].shape == (1, 1, 14, 8)
    assert {n: (x.shape, x.dtype, x.sharding) for n, x in got.items()} == {
        n: (x.shape, x.dtype, x.sharding) for n, x in wanted.items()
    }


def test_a_plan_does_not_read_the_images(folder):
    """The number of classes is not known then, and is left out."""
    config = Config(model=ModelConfig(name_or_path=str(folder / "base")))
    spec = open_spec(replace(config, data=DataConfig("absent")), jax.devices()[:1])
    assert spec.objective == Classes() and spec.config.train.seq_len == 17


def test_sizes_of_a_processor_and_long_images_are_bounded(folder, tmp_path):
    """A resized image would have gigabytes."""
    (tmp_path / "base").mkdir()
    file = tmp_path / "base" / "preprocessor_config.json"
    for key in ("size", "crop_size", "pad_size"):
        file.write_text(json.dumps(SETTINGS | {key: dict(height=10**6, width=16)}))
        with pytest.raises(ValueError, match=f"{key}=.*must have at most 128 pixels per side"):
            processor(tmp_path).check()
    settings = dict(size=dict(shortest_edge=18), do_center_crop=True, crop_size=SETTINGS["size"])
    file.write_text(json.dumps(SETTINGS | settings))
    found = processor(tmp_path)
    found.check()
    for sides, refused in (((1000, 20), False), ((1_000_000, 1), True)):
        pillow.new("1", sides).save(tmp_path / "x.png")
        image = Image(tmp_path / "x.png", NAMES[0])
        with pytest.raises(ValueError, match="one side is too long") if refused else nullcontext():
            found(image)


def test_a_model_of_gray_images(folder, tmp_path):
    settings = SETTINGS | dict(image_mean=[0.5], image_std=[0.5])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    own = replace(processor(folder, (1, 16, 16)), directory=tmp_path)
    own.check()
    assert own(Image(folder / "data" / "red" / "00.png", "red"))[0]["tokens"].shape == (17, 16)


def test_batches(folder, tmp_path):
    """Each image once an epoch, in an order that goes on exactly; damaged ones are left out."""
    shutil.copytree(folder / "data", tmp_path / "data")
    bad = tmp_path / "data" / "green" / "00.png"
    bad.write_bytes(bad.read_bytes()[:60])
    config = DataConfig(str(tmp_path / "data"), packing="none", eval_fraction=0.2)
    config = replace(config, bad_records="skip", num_shards=2)
    _, images, held_out = open_images(config)
    how = dict(
        seq_len=17,
        encoding=Classes().encoding(ModelConfig(causal=False, encoder=EncoderConfig(classes=3))),
    )
    check: DataCheck = data_check(images, held_out, processor(folder), config, **how)
    check.run()
    assert [each.file for each in check.bad] == [str(bad)]
    assert check.bad[0].reason.startswith("cannot be read as an image: ")
    loaders = [
        train_loader(images, processor(folder), config, **how, batch_size=4) for _ in range(2)
    ]
    first = [next(loaders[0]) for _ in range(20)]
    state = loaders[0].get_state()
    rest = next(loaders[0])
    loaders[1].set_state(state)
    np.testing.assert_array_equal(next(loaders[1])["tokens"], rest["tokens"])
    for loader in loaders:
        loader.close()
    # 17 and 16 images of the two shards, each of which has 2 sequences of a batch.
    epoch = np.concatenate([batch["tokens"][:2] for batch in first])[:17]
    assert len({each.tobytes() for each in epoch}) == 17
    evaluated = list(eval_loader(held_out, processor(folder), config, **how, batch_size=3))
    labels = np.concatenate([batch["labels"] for batch in evaluated])
    assert sorted(labels[labels >= 0].tolist()) == sorted(NAMES.index(x.name) for x in held_out)
    # Not the first images, which are of one class.
    (batch,) = eval_loader(held_out, processor(folder), config, **how, batch_size=3, max_batches=1)
    assert len(np.unique(batch["labels"][batch["labels"] >= 0])) > 1


def without_text(folder):
    (folder / "data" / "red" / "00.png").write_text("no image")


def broken_link(folder):
    (folder / "data" / "red" / "00.png").unlink()
    (folder / "data" / "red" / "00.png").symlink_to("moved.png")


def postscript(folder):
    pillow.new("RGB", (9, 9)).save(folder / "data" / "red" / "00.png", format="EPS")


def large(folder):
    """128 MB of zeros as about 200 kB."""
    pillow.new("L", (20_000, 9_500)).save(folder / "data" / "red" / "00.png")


def deep(folder):
    image = pillow.fromarray(np.zeros((9, 9), np.uint16))
    image.save(folder / "data" / "red" / "00.png")


def settings(**changes):
    def change(folder):
        file = folder / "base" / "preprocessor_config.json"
        file.write_text(json.dumps(SETTINGS | changes))

    return change


def no_patches(folder):
    file = folder / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": 0}))


def copied(source, target):
    return lambda folder: shutil.copytree(folder / "data" / source, folder / target)


# Of each: keys other than those of the config, a change of the files, and the error.
BAD = {
    "damaged": ({}, without_text, "red/00.png: cannot be read as an image: must be JPEG, PNG,"),
    "link": ({}, broken_link, "red/00.png: cannot be read as an image: [Errno 2] No such file"),
    "other format": ({}, postscript, "red/00.png: cannot be read as an image: must be JPEG, PNG,"),
    "too large": (
        {},
        large,
        "red/00.png: cannot be read as an image: Image size (190000000 pixels",
    ),
    "16 bits": ({}, deep, "red/00.png: cannot be read as an image: mode I;16: must have 8 bits"),
    "no patches": ({}, no_patches, "patch_size=(0, 0): must divide image_size=(16, 16), both of"),
    "empty class": ({}, lambda x: (x / "data" / "sky").mkdir(), "data/sky': must hold an image of"),
    "name": (
        {},
        lambda x: (x / "data" / "a\x1b[31m\n").mkdir(),
        r"'a\x1b[31m\n': must be a printable name of a class",
    ),
    "one class": (
        {"data.path": "one"},
        copied("red", "one/red"),
        "data.path=one: must hold the directories of at least 2 classes, not only 'red'",
    ),
    "no class": ({"data.path": "base"}, None, "'base': must hold a directory for each class; it"),
    "splits": ({"data.path": "."}, None, "must be in the directory of a class, one level below"),
    "list": ({"data.path": "[data]"}, None, "data.path=['data']: must be a directory, with"),
    "file": ({"data.path": "config.yaml"}, None, "data.path: 'config.yaml': must be a directory"),
    "other held-out class": (
        {"data.eval_path": "held"},
        copied("red", "held/rose"),
        "data.eval_path=held: class 'rose': must be in data.path=data too",
    ),
    "classes": (
        {"model.encoder.classes": 4},
        None,
        "model.encoder.classes=4: must be 3, the number of classes",
    ),
    "length": ({"train.seq_len": 32}, None, "train.seq_len=32: must be left out for the images"),
    "format": ({"data.format": "label"}, None, "data.format=label: must be left out for the"),
    "packing": ({"data.packing": "best_fit"}, None, "data.packing=best_fit: must be left out"),
    "positions": ({"model.max_position_embeddings": 40}, None, "must not be set for a model of i"),
    "size": (
        {},
        settings(size=dict(height=8, width=8)),
        "must make images of the model's size 3 × 16 × 16, not of 3 × 8 × 8",
    ),
    "crop": ({}, settings(size=dict(shortest_edge=16)), "model's size 3 × 16 × 16, not of 3 × 16"),
    "mean": ({}, settings(image_mean=[0.5]), "preprocessor_config.json: mean must have 3 elements"),
    "processor": (
        {},
        settings(image_processor_type="CLIPImageProcessor"),
        "image_processor_type='CLIPImageProcessor': must be one of ViTImageProcessor, ",
    ),
    "no processor": (
        {},
        lambda x: (x / "base" / "preprocessor_config.json").unlink(),
        "preprocessor_config.json: No such file",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(folder, tmp_path, capsys, name, monkeypatch):
    keys, change, message = BAD[name]
    for part in ("data", "base"):
        shutil.copytree(folder / part, tmp_path / part)
    monkeypatch.chdir(tmp_path)
    if change is not None:
        change(tmp_path)
    keys = {"model.name_or_path": "base", "data.path": "data", "device": "cpu"} | keys
    Path("config.yaml").touch()
    assert main([f"--{key}={value}" for key, value in (keys | {"run_dir": "run"}).items()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not Path("run").exists()


def test_text_and_images_do_not_mix(folder, tmp_path, capsys):
    assert preview(["--config", str(folder / "config.yaml")]) == 2
    assert "must be a model of text; bptjax preview shows no images" in capsys.readouterr().err
    sizes = "--model.encoder.image_size=[8, 8]", "--model.encoder.patch_size=[4, 4]"
    scratch = *sizes, "--model.causal=false", "--model.encoder.classes=2"
    flags = "--device=cpu", f"--data.path={folder / 'data'}", f"--run_dir={tmp_path / 'run'}"
    assert main([*flags, *scratch]) == 2
    assert "model.encoder.image_size=(8, 8): must come from a checkpoint" in capsys.readouterr().err
    # A model of text.
    assert main([*flags]) == 2
    assert "the directory must hold .txt" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
