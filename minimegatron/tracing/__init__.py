"""Recording, comparing and drawing what a run did: everything that watches through `core.tracing`.

    with minimegatron.trace() as t:      # in every rank
        train_step(...)
    t.plot("timeline.png")

This file imports nothing: what reads traces (`trace_file`, `run`, `step`, `compare`, `call_tree`,
`chrome`, `html`) works without torch. Megatron has no counterpart.
"""
