"""Slow hosts are named."""

import jax

from bptjax.training.slow_hosts import describe_slow_hosts, time_devices


def test_a_slow_host_is_named():
    """A host is as slow as its slowest process."""
    names = ["a", "a", "b", "b", "c", "c"]
    text = describe_slow_hosts(names, [1.0, 1.1, 1.0, 2.09, 0.9, 1.0])
    assert text.startswith("slow host: b takes 2.0 × the median of the other hosts for ")
    assert describe_slow_hosts(names, [1.0, 1.4, 1.0, 1.0, 0.9, 1.0]) == ""
    assert describe_slow_hosts(["a", "b"], [3.0, 1.0]).startswith("slow host: a takes 3.0 × ")


def test_devices_are_timed():
    assert 0 < time_devices(jax.local_devices()[:2]) < 10
