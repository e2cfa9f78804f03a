"""`make demo MODEL=rl`: a run of `train_rl`, its control, and whether the run has learned.

    python -m minimegatron.rl.demo [NAME=VALUE ...] torchrun ... -m minimegatron.train_rl ...

The control is the same command with `--rl-shuffle-rewards`: each answer gets the reward of another one.
A program that learns there too does not learn from rewards. Megatron has no counterpart.
"""

import re
import subprocess
import sys

AT_LEAST, HELD_OUT_AT_LEAST, CONTROL_AT_MOST = 0.8, 0.7, 0.05
"""Shares of right answers: drawn ones, likeliest ones to prompts never trained on, the control's."""

SUMMARY = re.compile(r"exact answers ([\d.]+) .*held-out ([\d.]+|none)")


def main(words: list[str]) -> int:
    """0 if the run has learned and its control has not, 1 if not, or what `torchrun` said."""
    found = {}
    for name, more in (("rewards", []), ("rewards by lot", ["--rl-shuffle-rewards"])):
        print(f"\n-- {name} --\n", flush=True)
        code, text = run([*words, *more])
        summary = SUMMARY.search(text)
        if code or summary is None:
            return code or 1
        found[name] = [0.0 if share == "none" else float(share) for share in summary.groups()]
    return judge(found)


def run(words: list[str]) -> tuple[int, str]:
    """Exit code and output of a command line, settings first as in a shell; it is shown as it comes."""
    lines = []
    with subprocess.Popen(["env", *words], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def judge(found: dict[str, list[float]]) -> int:
    """Prints one line for each run; 1 if a share is not what it should be."""
    (exact, held_out), (control, _) = found.values()
    print("\n                  exact answers   held-out answers")
    for name, (drawn, likeliest) in found.items():
        print(f"{name:16}  {drawn:13.3f}   {likeliest:16.3f}")
    wrong = []
    if exact < AT_LEAST:
        wrong.append(f"exact answers {exact:.3f} are below {AT_LEAST}")
    if held_out < HELD_OUT_AT_LEAST:
        wrong.append(f"held-out answers {held_out:.3f} are below {HELD_OUT_AT_LEAST}")
    if control > CONTROL_AT_MOST:
        wrong.append(f"the control's {control:.3f} are above {CONTROL_AT_MOST}")
    print(f"\n{'; '.join(wrong) or 'It learned from its rewards, and from nothing else.'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
