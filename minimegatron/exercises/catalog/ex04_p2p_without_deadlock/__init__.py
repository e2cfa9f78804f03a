"""P2P without deadlock: in which order a stage starts its sends and receives."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex04_p2p_without_deadlock",
    title="P2P without deadlock",
    tier="core",
    minutes=25,
    num_ranks=4,
    mirrors="minimegatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._in_order",
    summary="Order the sends and receives of one exchange so that nobody waits for ever.",
    real=("minimegatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._in_order",),
    question=(
        "Why is the order on even ranks another one than on odd ranks, and what happens in a "
        "ring of an odd number of stages?"
    ),
)
