"""``run_pretrain.py`` in a process that cannot import TensorFlow."""

import runpy
import sys
from pathlib import Path

sys.modules["tensorflow"] = None  # type: ignore[assignment]
runpy.run_path(str(Path(__file__).resolve().parents[2] / "run_pretrain.py"), run_name="__main__")
