"""What git says of this repository.

Called by: `full`, `gpu.report`. Imports what every Python has.
"""

import subprocess
from pathlib import Path


def git(*words: str) -> str:
    """What git answers about this repository; empty where it has no answer."""
    try:
        folder = Path(__file__).parent
        # Also where the checkout is somebody else's, as a copy on another machine may be.
        command = ["git", "-c", "safe.directory=*", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
