"""Known mistakes in what a program for Megatron gives and gets, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_NAMES = (
    Fault(
        "any-value-is-taken",
        "core/left_out_record.py",
        "    if not left_out.takes(value):\n",
        "    if False:\n",
        "A program asks for what is not there, gets something else, and no error.",
    ),
    Fault(
        "zero-is-false",
        "core/left_out_record.py",
        "    return value == known and isinstance(value, bool) == isinstance(known, bool)\n",
        "    return value == known\n",
        "A number given by position, such as a chunk's 0, is dropped as if it were a flag that is off.",
    ),
    Fault(
        "positions-of-our-own",
        "core/left_out_record.py",
        "zip(about.order, positional, strict=False)",
        "zip((x for x in about.order if x in own), positional, strict=False)",
        "Arguments by position mean something else than in Megatron.",
    ),
    Fault(
        "inner-fork-repeats",
        "core/tensor_parallel/random.py",
        "            self.states_[outer] = before\n",
        "            pass\n",
        "A fork within a fork of the same name draws the outer one's numbers again.",
    ),
    Fault(
        "stage-that-thinks-it-is-alone",
        "core/transformer/transformer_block.py",
        "        check_num_stages(config, num_stages)\n",
        "",
        "With a configuration of one stage, each of four stages builds the whole model's layers.",
    ),
)
