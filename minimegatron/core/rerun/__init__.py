"""What stands around the rerun state machine: each part can be read by itself.

* `states`: modes, states, verdicts, exit codes; whether a number is much larger than those before it;
  a file of rejected results, and which iterations it says to skip.
* `data_iterator`: gives a step's microbatches once more.
* `verdicts`: judges the results of one rank; and pretends that one is wrong, to try all this.
* `step_runs`: which run of a step follows, decided by all ranks together.
* `differences`: whether two results are the same.
* `two_runs`, `statistics`: how far results of two runs of a step lie apart.
* `random_numbers`: every generator of a process, saved and put back.
* `current`: the machine of this process.

Counterpart: parts of `megatron.core.rerun_state_machine`, where all have their names here too.
"""
