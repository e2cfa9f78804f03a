"""Known mistakes in finding the slow rank, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_DETECTOR, _TIMES = "core/straggler_detector.py", "core/straggler_detector.py"
_WORDS = "core/straggler_words.py"

FAULTS_OF_STRAGGLERS = (
    Fault(
        "straggler-counts-the-wait",
        _WORDS,
        "key=lambda rank: -table[rank][0]",
        "key=lambda rank: -sum(table[rank][:2])",
        "Ranks are compared by the time of batch and forward together. While the batch is fetched, the "
        "ranks of a tensor-parallel group wait for the one that reads, and all look slow.",
    ),
    Fault(
        "straggler-runs-on-after-an-error",
        _DETECTOR,
        "        if not self._off:\n            self.stop()\n",
        "        if not self._off and ex_type is None:\n            self.stop()\n",
        "A forward that fails leaves its clock running. The next step, which could work, raises a "
        "RuntimeError.",
    ),
    Fault(
        "straggler-names-the-fastest",
        _WORDS,
        "key=lambda rank: -table[rank][0]",
        "key=lambda rank: table[rank][0]",
        "The ranks are sorted the other way round: who replaces the machine that is named, replaces "
        "the best one.",
    ),
    Fault(
        "straggler-adds-up-reports",
        _TIMES,
        "        self.reset()\n        return 1000.0",
        "        return 1000.0",
        "Each report contains the steps of the ones before. Times grow from report to report, and "
        "a rank that has become slow is seen late.",
    ),
)
