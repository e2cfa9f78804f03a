"""Runs the thirteen parts on the GPUs of this machine: `make gpu-check`.

Calls: `run_parts`, docs/tools/gpu_page.py. Writes docs/gpu/report.json, from which the page and what
README and the site say of GPUs are made. Without a GPU nothing is checked and nothing written.
"""

import json
import sys

import torch
from gpu_page import REPORT, write_gpu_page

from tests.gpu.parts import PARTS
from tests.gpu.place import Place
from tests.gpu.report import NO_GPU, run_parts


def main() -> int:
    """The exit status: 1 if a part that was run does not hold."""
    if not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    report = run_parts(PARTS, Place("cuda", torch.cuda.device_count()))
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    (folder := REPORT.parents[2] / "build").mkdir(exist_ok=True)
    page = write_gpu_page(folder, REPORT)
    print(f"Written: {REPORT}, and a page of it, {page}")
    return int(any(entry["state"] == "failed" for entry in report["parts"]))


if __name__ == "__main__":
    sys.exit(main())
