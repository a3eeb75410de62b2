"""Checks the JobSet manifest of docs/distributed.md against the schema of JobSet. Unknown keys are
errors. Needs `pip install jsonschema`, and the schema from JobSet's repository:

    python scripts/jobset.py config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml

Prints each error, and exits with 1 if there is one. Rules in CEL are not evaluated.
"""

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"


def closed(schema: Any) -> Any:
    """Returns a schema in which keys without a description are errors."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        changed["type"] = ["integer", "string"]
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        changed.setdefault("additionalProperties", False)
    return changed


def errors(crd: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Returns the errors of a manifest."""
    version = manifest["apiVersion"].rpartition("/")[2]
    (schema,) = [
        each["schema"]["openAPIV3Schema"]
        for each in crd["spec"]["versions"]
        if each["name"] == version
    ]
    # The schema leaves the metadata to Kubernetes.
    rest = {key: value for key, value in manifest.items() if key != "metadata"}
    found = import_module("jsonschema").Draft7Validator(closed(schema)).iter_errors(rest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schema", type=Path, help="custom resource definition of JobSet")
    crd = yaml.safe_load(parser.parse_args(argv).schema.read_text())
    (text,) = re.findall(r"```yml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = errors(crd, yaml.safe_load(text))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
