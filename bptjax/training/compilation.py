"""Compiles the step of a run, and logs its kernels, its memory and the size of the model."""

from collections.abc import Callable

import jax

from bptjax.ops.choices import Choice, record_choices
from bptjax.run.output import plural
from bptjax.run.progress import Compilations
from bptjax.training.guards import RunFailed
from bptjax.training.spec import TrainSpec
from bptjax.training.state import TrainState, parameter_counts
from bptjax.training.step import Batch, compile_step


class StepCompiler:
    """Compiles the step of a run. Logs the kernels, and the first time also memory and model size.

    Attributes:
      compilations: announces compilations, with the duration of the last one.
    """

    def __init__(self, spec: TrainSpec, log: Callable[[str], None], seconds: float | None):
        """Makes a compiler. `seconds` is the duration of an earlier compilation of the run."""
        self._spec, self._log = spec, log
        self.compilations = Compilations(log, seconds)
        self._choices: dict[Choice, None] = {}
        self._described = False

    @property
    def kernels(self) -> list[str]:
        """Lines about the kernels that the step uses."""
        return [line for choice in self._choices for line in choice.lines()]

    def compile(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """Compiles the step for the shape of the batch.

        Raises:
          RunFailed: the step does not use the host memory that execution.offload asks for.
        """
        log = self._log
        A, B, T = batch["labels"].shape
        text = f"compiling the step for {A} × {plural(B, 'sequence')} of {T} tokens"
        with self.compilations.announce(text), record_choices() as choices:
            compiled = compile_step(self._spec, state, batch)
        for choice in choices:
            if choice not in self._choices:
                for line in choice.lines():
                    log(line)
                self._choices[choice] = None
        needs = compiled.memory_analysis()
        offload = self._spec.execution.offload
        if offload and not (needs and needs.host_temp_size_in_bytes):
            raise RunFailed(
                f"execution.offload={offload}: the compiled step uses no host memory; set it to 0"
            )
        if self._described:
            return compiled
        self._described = True
        log(f"compiled in {self.compilations.seconds:.0f} s")
        total, trained = parameter_counts(self._spec)
        text = f"model: {total:,} parameters"
        if trained < total:
            text += f", {trained:,} of them trained ({trained / total:.3%})"
        log(text)
        if needs is not None:
            held, extra = needs.argument_size_in_bytes, needs.temp_size_in_bytes
            text = f"a step holds {held / 2**30:.2f} GiB and needs {extra / 2**30:.2f} GiB more"
            log(f"{text} per device")
            if host := needs.host_argument_size_in_bytes:
                log(f"a step holds {host / 2**30:.2f} GiB on the host")
        return compiled
