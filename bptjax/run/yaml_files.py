"""YAML files of configs, with limits on their size and on the values that aliases repeat."""

from pathlib import Path
from typing import Any

# Copy of the config in a run directory.
RUN_CONFIG = "config.yaml"
# Limits of a file. With `&name` and `*name`, a few lines can repeat 10 values a billion times.
FILE_BYTES = 2**20
VALUES = 100_000
# Allowed tags of keys: text, and `<<`.
KEYS = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


def read_yaml(file: Path) -> dict[str, Any]:
    """Reads the keys and values of a YAML file.

    Raises:
      ValueError: as `compose`; or a value has a tag of another language.
    """
    import yaml

    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(compose(file))
    except yaml.YAMLError as error:
        raise ValueError(f"must be YAML; {_problem(error)}") from error


def compose(file: Path) -> Any:
    """Returns the nodes of a YAML file of keys and values.

    Raises:
      ValueError: the file cannot be read, is not YAML, has keys that are not text, or exceeds a
        limit. The error does not name the file.
    """
    import yaml

    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES + 1)
        if len(data) > FILE_BYTES:
            raise ValueError(f"must have at most {FILE_BYTES:,} bytes")
        tree = yaml.compose(data.decode("utf-8"))
        if not isinstance(tree, yaml.MappingNode):
            raise ValueError("must hold keys with values, such as seed: 1")
        if _count(tree, {}) > VALUES:
            raise ValueError(
                f"must have at most {VALUES:,} values, counted as often as aliases repeat them"
            )
    except OSError as error:
        raise ValueError(f"must be a file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"must be in UTF-8; byte {error.start} is not") from error
    except yaml.YAMLError as error:
        raise ValueError(f"must be YAML; {_problem(error)}") from error
    except RecursionError as error:
        raise ValueError("must not be nested so deeply") from error
    return tree


def _count(node: Any, counted: dict[int, int]) -> int:
    """Counts the values of a node, without visiting each repetition.

    Args:
      counted: counts of the nodes visited before, by id.
    """
    import yaml

    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
        return 1
    if id(node) in counted:
        if not counted[id(node)]:
            raise ValueError(f"line {node.start_mark.line + 1}: must not contain itself")
        return counted[id(node)]
    counted[id(node)] = 0
    values = node.value
    if isinstance(node, yaml.MappingNode):
        for key, _ in values:
            if key.tag not in KEYS:
                raise ValueError(
                    f"line {key.start_mark.line + 1}: each key must be text; put it in quotes"
                )
        values = [value for _, value in values]
    counted[id(node)] = 1 + sum(_count(value, counted) for value in values)
    return counted[id(node)]


def _check_scalar(node: Any) -> None:
    """Refuses a value that does not match its tag, or an integer with too many digits."""
    import yaml

    try:
        yaml.SafeLoader("").construct_object(node)
    # YAML's constructors let conversion errors through.
    except (ValueError, KeyError, AttributeError, yaml.YAMLError) as error:
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        text = f"line {node.start_mark.line + 1}: {node.value[:40]!r}: must be of the type {tag}"
        raise ValueError(f"{text}, of at most 4,300 digits; put text in quotes") from error


def _problem(error: Exception) -> str:
    return " ".join(str(error).replace(' in "<unicode string>"', "").split())
