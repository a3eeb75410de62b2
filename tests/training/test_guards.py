"""Guards of a run: signals."""

import signal

import pytest

from bptjax.training import guards


def test_a_signal_that_is_sent_twice_at_once_is_one(monkeypatch):
    """As by a scheduler to the run and to its supervisor, which passes it on. A later one ends the
    process as usual."""
    with guards.stop_signals() as got:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert got == [signal.SIGINT]
        monkeypatch.setattr(guards, "REPEATED_S", -1.0)
    with pytest.raises(KeyboardInterrupt), guards.stop_signals() as got:
        signal.raise_signal(signal.SIGINT)
        assert got == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
