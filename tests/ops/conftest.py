"""Shapes and dtypes in bptjax.ops's signatures are checked at every call."""

from jaxtyping import install_import_hook

install_import_hook("bptjax.ops", "shapes.check")
