"""Compares every family of checkpoints with transformers, and writes the largest differences.

    python scripts/parity.py --out scripts/results/parity.json

Runs tests/weights/hf/test_parity.py: float32 on a CPU, tiny configurations of each family.
Differences are relative to the largest value; of a gradient, to the larger of its largest value and
a thousandth of the largest value of all gradients.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
MEASURES = "hidden", "loss", "gradients"


def rows(report: Path) -> list[dict]:
    """Returns a row for each family: the largest differences, and the number of configurations."""
    found: dict[str, dict] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        named = re.search(r"\[([^:\]]+)", case.get("name", ""))
        measured = {p.get("name"): float(p.get("value", "nan")) for p in case.iter("property")}
        if named and measured:
            row = found.setdefault(named[1], dict(family=named[1], configurations=0))
            row["configurations"] += "hidden" in measured
            for name in MEASURES:
                if name in measured:
                    row[name] = max(row.get(name, 0.0), measured[name])
    packages = {name: version(name) for name in ("jax", "torch", "transformers")}
    return [row | packages for row in found.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        # The default family of reports has no properties of tests.
        command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1"]
        command += [f"--junitxml={report}"]
        command += ["-m", "not gpu and not timing"]
        subprocess.run([*command, "tests/weights/hf/test_parity.py"], cwd=ROOT, check=True)
        made = rows(report)
    args.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
