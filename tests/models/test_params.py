"""Parameters that are read slice by slice."""

import numpy as np

from bptjax.models.params import ArraySpec, stacked
from bptjax.run import progress


class Source:
    """A `ParameterSource` of a stack of two layers and a norm."""

    specs = {"layers.w": ArraySpec("float32", (2, 3)), "norm": ArraySpec("float32", (2,))}
    files = ()

    def read(self, path, index=()):
        raise NotImplementedError

    def slices(self):
        for layer in range(2):
            yield "layers.w", (layer,), np.full(3, layer, np.float32)
        yield "norm", (), np.ones(2, np.float32)


def test_stacking_shows_the_time_left(monkeypatch):
    """With the time that the caller spends on each parameter, such as to quantize it. The estimate
    leaves out the first of two slices."""
    now, lines, found = [0.0], [], {}
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    for path, array in stacked(Source(), lines.append):
        found[path] = array.tolist()
        now[0] += 12.0
    assert found == {"layers.w": [[0.0] * 3, [1.0] * 3], "norm": [1.0, 1.0]}
    assert lines == ["loading weights: 75%, 0:00:08 left"]
