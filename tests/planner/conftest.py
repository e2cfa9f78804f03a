"""Some of what pages say follows from plans: the tools that compute it are tested here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tools"))
