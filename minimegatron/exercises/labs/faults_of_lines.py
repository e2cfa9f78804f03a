"""Known mistakes in recording the lines of a step, and in showing them, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_RECORDER, _TREE = "tracing/line_recorder.py", "tracing/unrolled.py"
_ROWS = "tracing/code_rows.py"

FAULTS_OF_LINES = (
    Fault(
        "lines-of-a-describer",
        _RECORDER,
        "            return self._mute(frame)  # it describes a call to those who watch\n",
        "            pass\n",
        "What describes a call to those who watch looks like a part of the step. Without watching, the "
        "step does not run these lines.",
    ),
    Fault(
        "generator-called-anew",
        _RECORDER,
        "        if is_generator and frame.f_lineno != code.co_firstlineno and",
        "        if False and",
        "Each value that a generator is asked for counts as a call of it.",
    ),
    Fault(
        "comprehension-ends-its-function",
        _RECORDER,
        "return _tracer(around, [])",
        "return _tracer(around, self._stack)",
        "Where a list comprehension ends, its function counts as ended. What the function calls after "
        "that is shown as called by its caller.",
    ),
    Fault(
        "lines-recorded-for-ever",
        _RECORDER,
        "            self._root = None\n            self._until_end.close()\n",
        "            self._root = None\n",
        "The interpreter goes on reporting lines when the step is over: all later steps are slow.",
    ),
    Fault(
        "message-meets-another",
        _TREE,
        "(other.node.number, other.number)",
        "(other.node.number, end.number)",
        "A message leads to the right call of the other rank, and there to another message.",
    ),
    Fault(
        "microbatch-of-the-outer-call",
        _TREE,
        "    return ((event.action.microbatch, event.action.chunk),)\n",
        "    return around\n",
        "No call is of a microbatch, since the outermost is of none.",
    ),
    Fault(
        "first-call-out-of-sight",
        _TREE,
        "        for first in self.first:\n            node: CallNode | None = first\n",
        "        for first in self.first:\n"
        "            node: CallNode | None = first if first.parent is None else None\n",
        "A function that is called first within a call whose lines were shown before is never shown.",
    ),
    Fault(
        "one-line-of-a-statement",
        _ROWS,
        "state = RAN if any(n in ran for n in statement.inside) else NOT_RUN",
        "state = NOT_RUN",
        "A `try:` or an `else:` whose block ran is folded away above it.",
    ),
)
