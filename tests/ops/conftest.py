"""Shapes and dtypes in the signatures of bptjax.ops are checked at every call."""

from jaxtyping import install_import_hook

from ops.shapes import check

install_import_hook("bptjax.ops", f"{check.__module__}.{check.__name__}")
