"""What stands around the rerun state machine: each part can be read by itself.

* `states`: modes, states, verdicts, exit codes; plain Python.
* `compare`: whether two results are the same.
* `injector`: pretends that a result is wrong, to try all this.
* `tracker`: a file of rejected results, and which iterations it says to skip.
* `statistics`: how far results of two runs of a step lie apart.
* `random_numbers`: every generator of a process, saved and put back.

Counterpart: parts of `megatron.core.rerun_state_machine`, where all have their names here too.
"""
