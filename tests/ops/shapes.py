"""The checker of jaxtyping's shapes."""

from beartype import beartype


def check(f):
    """Checks every function but constructors: JAX rebuilds pytrees around placeholders."""
    return f if f.__name__ == "__init__" else beartype(f)
