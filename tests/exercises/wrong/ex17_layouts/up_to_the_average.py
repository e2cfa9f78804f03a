"""Stages are filled up to the average; what is left goes to the last.

Expected: is the slowest and takes 19, but a layout exists whose slowest stage is faster your layout:
"""


def choose_layout(num_layers, pipeline_model_parallel_size, layer_times):
    p = pipeline_model_parallel_size
    layers = "E" + "t" * num_layers + "L"
    names = {"E": "embedding", "t": "decoder", "L": "loss"}
    average = sum(layer_times[names[layer]] for layer in layers) / p
    stages, filled = [""], 0
    for layer in layers:
        time = layer_times[names[layer]]
        if filled + time > average and len(stages) < p:
            stages, filled = [*stages, ""], 0
        stages[-1] += layer
        filled += time
    return "|".join([*stages[:-1], *[""] * (p - len(stages)), stages[-1]])
