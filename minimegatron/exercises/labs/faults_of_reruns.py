"""Known mistakes in running a step again and judging its result, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_RUNS = "core/rerun/step_runs.py"
_VERDICTS = "core/rerun/verdicts.py"
_TRAINING = "training/training.py"

FAULTS_OF_RERUNS = (
    # -- What is put back before a step runs again --
    Fault(
        "rerun-does-not-rewind",
        _RUNS,
        "            iterator.rewind()\n",
        "            pass\n",
        "The second run reads the microbatches that come next. The loss is wrong, and a resumed run, "
        "which counts the samples of one run, reads them once more.",
    ),
    Fault(
        "rerun-keeps-rng",
        _RUNS,
        "self._undo = self._keep(), random_numbers.keep_random_numbers()",
        "self._undo = (self._keep(),)",
        "Dropout draws on where the first run stopped. The loss is wrong by a little, the second "
        "result never equals the first, and every fault of the data passes for a transient one.",
    ),
    Fault(
        "rerun-without-zero-grad",
        _TRAINING,
        "    while machine.should_run_forward_backward(data_iterator):  # once, unless a result was "
        "rejected\n"
        "        # -- 1. Gradients back to zero: in the buffers, and where autograd may have left some "
        "--\n"
        "        for chunk in model:\n"
        "            chunk.zero_grad_buffer()\n"
        "        optimizer.zero_grad()\n",
        "    for chunk in model:\n"
        "        chunk.zero_grad_buffer()\n"
        "    optimizer.zero_grad()\n"
        "    while machine.should_run_forward_backward(data_iterator):\n",
        "The second run adds to the gradients of the first, bad ones included: a NaN that has passed "
        "is in the weights all the same. The losses look right.",
    ),
    Fault(
        "rerun-forgets-buffers",
        "training/reruns.py",
        "return StateOfStep(config, model).put_back, recompute.keep_rng_states(model)",
        "return (recompute.keep_rng_states(model),)",
        "What the first run wrote into the model's buffers stays there: tokens of an expert are "
        "counted twice, and its bias moves the wrong way.",
    ),
    # -- Who decides, and when --
    Fault(
        "rerun-decided-alone",
        _RUNS,
        "(again,) = of_any_rank(self.judge.wishes.rerun)",
        "again = self.judge.wishes.rerun",
        "The rank with the bad result begins the step again, and the others go on to the update: the "
        "ranks wait for each other for ever, each in another message.",
    ),
    Fault(
        "step-before-verdict",
        _TRAINING,
        "    if should_exit:\n"
        "        return {}, 1, should_checkpoint, should_exit, exit_code, None, None\n"
        "\n"
        "    # -- 3. The update; then the ranks of a model agree on what they report --\n"
        "    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()\n",
        "    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()\n"
        "    if should_exit:\n"
        "        return {}, 1, should_checkpoint, should_exit, exit_code, None, None\n",
        "The weights are updated with the rejected gradients before the run ends. The checkpoint, "
        "which should be of the step before, has them, and the resumed run begins elsewhere.",
    ),
    Fault(
        "fatal-is-outvoted",
        _RUNS,
        "if go_on and not (checkpoint or end):",
        "if go_on:",
        "A rank whose bad result was not fatal has the run go on, where another rank's was fatal.",
    ),
    Fault(
        "verdict-of-an-earlier-step",
        _VERDICTS,
        "        self.failed_call: JudgedCall | None = None\n"
        "        self.initial_result: Any = None\n",
        '        self.failed_call = vars(self).get("failed_call")\n'
        '        self.initial_result = vars(self).get("initial_result")\n',
        "A rejected call is remembered after its step. A later step that runs again for another "
        "rank's sake is compared with it, and gets the verdict on numbers of the earlier one, as in "
        "Megatron.",
    ),
    # -- What is compared with what --
    Fault(
        "rerun-compares-first-call",
        "core/rerun_state_machine.py",
        "call = JudgedCall(message, rank(), self.validation_counts[message])",
        "call = JudgedCall(message, rank(), 1)",
        "All calls of a run count as the first. The bad loss of a later microbatch is compared with "
        "the good one of microbatch 0.",
    ),
    Fault(
        "first-run-not-kept",
        _VERDICTS,
        "return result.detach().clone() if",
        "return result.detach() if",
        "The first run's result shares its memory with the second's, which is written over it. The "
        "two are always the same, so no error is ever a transient one.",
    ),
    Fault(
        "nan-is-within-the-tolerance",
        _VERDICTS,
        "is_other = not self.injector.maybe_miscompare(differs, first, result, state) <= tolerance",
        "is_other = self.injector.maybe_miscompare(differs, first, result, state) > tolerance",
        "A difference that is NaN exceeds no tolerance, so two results that cannot be compared count "
        "as the same.",
    ),
    Fault(
        "same-device-for-ever",
        _VERDICTS,
        "if self.num_on_same_device < MAX_RUNS_ON_SAME_DEVICE:",
        "if self.num_on_same_device:",
        "A scheduler that has one machine resumes the run on it without end, and each time a "
        "restart is asked for, as by Megatron.",
    ),
)
