"""`make stubs`: the type stubs of TensorRT in a folder of their own, where mypy finds them and Python does not.

The package tensorrt-stubs cannot be an extra. It asks for one exact TensorRT (10.13, CUDA 12) with all its libraries;
installed beside Python's packages it makes `import tensorrt` succeed with an empty namespace; its py.typed lies in
another package than its stubs, so mypy would not read them there; and no release parses: five signatures are not
Python. They are repaired here, by exactly these substitutions.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "tensorrt-stubs==10.13.0.35.1"
REPAIRS = (
    (", in: list[", ", in_: list["),  # a keyword as a parameter's name
    ("power: Weights = None, channel_axis: int)", "power: Weights = None, channel_axis: int = ...)"),
)


def repair(folder: Path) -> None:
    """Make every stub in `folder` parse; SyntaxError names the one that does not."""
    for path in sorted(folder.rglob("*.pyi")):
        text = path.read_text(encoding="utf-8")
        for wrong, right in REPAIRS:
            text = text.replace(wrong, right)
        ast.parse(text, str(path))
        path.write_text(text, encoding="utf-8")


def main(target: Path) -> None:
    """Fetch the stubs with pip, without what they depend on, and put them into `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        found = Path(temporary) / "stubs"
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(found),
                        PACKAGE], check=True)
        repair(found)
        found.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
