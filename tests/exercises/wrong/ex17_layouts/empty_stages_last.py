"""Stages that are not needed are put at the end, behind the loss.

Expected: L is not last
"""


def choose_layout(num_layers, pipeline_model_parallel_size, layer_times):
    p = pipeline_model_parallel_size
    layers = "E" + "t" * num_layers + "L"
    names = {"E": "embedding", "t": "decoder", "L": "loss"}
    times = [layer_times[names[layer]] for layer in layers]
    sums = {sum(times[i:j]) for i in range(len(times)) for j in range(i + 1, len(times) + 1)}
    for limit in sorted(limit for limit in sums if limit >= max(times)):
        stages, filled = [""], 0
        for layer, time in zip(layers, times, strict=True):
            if filled + time > limit + 1e-9:
                stages, filled = [*stages, ""], 0
            stages[-1] += layer
            filled += time
        if len(stages) <= p:
            return "|".join(stages + [""] * (p - len(stages)))
    return "|".join(stages)
