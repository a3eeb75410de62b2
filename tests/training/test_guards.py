"""Guards of a run: signals, and heartbeats for its supervisor."""

import signal

import pytest

from bptjax.cli.train import main
from bptjax.data.batches import Batches
from bptjax.data.renderer import TemplateFault
from bptjax.run.checkpoint import Checkpoints
from bptjax.training import guards


def test_a_signal_that_is_sent_twice_at_once_is_one(monkeypatch):
    """As by a scheduler to the run and to its supervisor, which passes it on. A later one ends the
    process as usual."""
    now = [0.0]
    monkeypatch.setattr(guards.time, "monotonic", lambda: now[0])
    with guards.stop_signals() as got:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert got == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt), guards.stop_signals() as got:
        signal.raise_signal(signal.SIGINT)
        assert got == [signal.SIGINT]
        now[0] += 1.1
        signal.raise_signal(signal.SIGINT)


def test_an_error_of_the_run_is_not_that_of_its_lock(tmp_path):
    with pytest.raises(BlockingIOError, match="in the run"), guards.exclusive(tmp_path):
        with pytest.raises(ValueError, match="another process"), guards.exclusive(tmp_path):
            pass
        raise BlockingIOError("in the run")
    with guards.exclusive(tmp_path):
        pass


@pytest.mark.thorough
def test_signs_of_life(arguments, tmp_path, monkeypatch):
    """A step after other work is known to be one when it starts: a supervisor waits less for it."""
    seen = []
    monkeypatch.setattr("bptjax.training.loop.beat", lambda *work: seen.append(work))
    flags = ["--train.max_steps=4", "--checkpoint.save_steps=2", "--data.eval_fraction=0"]
    flags += ["--train.eval_steps=null", "--train.sample_tokens=0"]
    assert main([*arguments, *flags, f"--run_dir={tmp_path / 'run'}"]) == 0
    first = [("training", n) for n in (0, 1, 2)]
    second = [("training", n) for n in (2, 3, 4)]
    saved = [(f"saving step {n}",) for n in (2, 4)]
    assert seen == [*first, saved[0], *second, saved[1], ("finishing",)]


@pytest.mark.thorough
def test_a_template_that_exceeds_a_limit_during_training(arguments, tmp_path, monkeypatch, capsys):
    """The steps before it are saved, as for a bad record."""
    draw, drawn = Batches.__next__, []

    def exceed(self):
        drawn.append(0)
        if len(drawn) == 4:
            raise TemplateFault("the chat template takes more than 10 s for one chat")
        return draw(self)

    monkeypatch.setattr(Batches, "__next__", exceed)
    flags = ["--data.eval_fraction=0", "--train.eval_steps=null", "--train.sample_tokens=0"]
    assert main([*arguments, *flags, f"--run_dir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: step 4: the chat template takes") and "step 3 is saved" in error
    assert Checkpoints(tmp_path / "run").newest() == 3
