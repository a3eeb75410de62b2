"""The checker of jaxtyping's shapes."""

from functools import wraps

from beartype import beartype
from jaxtyping import jaxtyped


def check(f):
    """Checks arguments and results of every annotated function but constructors: JAX rebuilds
    pytrees around placeholders.

    jaxtyping's own decorator costs twice as much: it binds the arguments to the signature, checks
    them twice, and also wraps functions that say no type.
    """
    if isinstance(f, type) or f.__name__ == "__init__" or not f.__annotations__:
        return f
    checked = beartype(f)
    if any("{" in str(t) for t in f.__annotations__.values()):  # A shape that reads an argument.
        return jaxtyped(checked, typechecker=None)

    @wraps(f)
    def call(*args, **kwargs):
        with jaxtyped("context"):
            return checked(*args, **kwargs)

    return call
