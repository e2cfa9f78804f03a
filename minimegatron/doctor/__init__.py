"""The hang doctor: when ranks stop moving, it says who waits for whom, in which call, and why.

Used through `minimegatron.launch(..., hang_timeout=...)` and `--hang-timeout` of a training command.
Megatron has no counterpart: there a hang ends, after ten minutes, in a time-out of one
collective on every rank, and nobody says which rank did not come.

In the order to read it:

* `records`: what is known of one rank, as plain data.
* `shared_record`: how a rank keeps that in memory which others can read while it is stuck.
* `observer`: from the traced calls of `core.tracing` into that memory.
* `torch_calls`: the same for calls of `torch.distributed` that nobody traced.
* `flight_recorder`: what a rank's GPU was given and has not completed, as torch remembers it.
* `inquiry`: how a rank is asked for that while it is stuck.
* `units`: which microbatch the n-th message of a step carries.
* `device_waits`: which ranks a rank's GPU waits for.
* `situation`: one rank's record as a sentence: what it does, and whom it waits for.
* `case`: who waits for whom, as arrows.
* `causes`: what can be at the end of the arrows, and how to tell.
* `diagnosis`: all of that: from records to the cause. A pure function, without torch.
* `verdict`, `words`: what a diagnosis is; the report, for a person.
* `processes`: what the system tells of a process, and the Python stacks of stuck ones.
* `folders`: where processes share files, and who removes them however the processes end.
* `watch`: notices that nobody moves.
* `watchman`, `machines`: a process that does so under torchrun, and ends the job; on many machines.
* `session`: what a rank under torchrun does to be watched.
"""
