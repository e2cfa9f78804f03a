"""The parts of the check read tools of the documentation: its notebooks, its page."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tools"))
