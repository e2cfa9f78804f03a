"""A layout for an unbalanced model, solved.

Called by: the check. The slowest stage's time is some sum of consecutive layers. For a given limit,
filling stages from the front as far as the limit allows needs the fewest stages; the smallest limit
for which p stages are enough is the answer.
"""


def choose_layout(
    num_layers: int, pipeline_model_parallel_size: int, layer_times: dict[str, float]
) -> str:
    """The layout string whose slowest stage is as fast as possible."""
    names = {"E": "embedding", "t": "decoder", "L": "loss"}
    layers = ["E"] + ["t"] * num_layers + ["L"]
    times = [layer_times[names[layer]] for layer in layers]
    # The time of any run of layers; the best slowest stage is one of these runs.
    limits = {sum(times[i:j]) for i in range(len(times)) for j in range(i + 1, len(times) + 1)}
    for limit in sorted(limits):
        stages = _fill(layers, times, limit)
        if stages is not None and len(stages) <= pipeline_model_parallel_size:
            break
    # L stays on the last stage, so empty ones go before it; E stays on the first.
    empty = [""] * (pipeline_model_parallel_size - len(stages))
    if len(stages) == 1 and empty:
        stages, empty = [stages[0][:-1], stages[0][-1]], empty[1:]
    return "|".join([*stages[:-1], *empty, stages[-1]])


def _fill(layers: list[str], times: list[float], limit: float) -> list[str] | None:
    """Stages filled from the front, none above `limit`; None if a single layer is above it."""
    stages, filled = [""], 0.0
    for layer, time in zip(layers, times, strict=True):
        if time > limit + 1e-9:
            return None
        if filled + time > limit + 1e-9:
            stages.append("")
            filled = 0.0
        stages[-1] += layer
        filled += time
    return stages


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
