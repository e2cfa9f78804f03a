"""One parity case from the command line: `python -m tests.probes '{"tp": 2, "M": 2}' [SECONDS]`.

For the mutation tests and for whoever hunts a difference. Exits 1 and prints what differs.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.parity import Case, reference, run_cases
from tests.ranks import run_ranks


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        work = [(case, reference(case.serial(), Path(folder)))]
        timeout = float(sys.argv[2]) if len(sys.argv) > 2 else 40
        results = run_ranks(run_cases, case.world, work, timeout=timeout)
    problems = [problem for rank in results for *_, found in rank for problem in found]
    print("\n".join(problems) or f"{case}: equal")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
