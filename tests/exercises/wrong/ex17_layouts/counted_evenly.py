"""Layers are counted evenly, as if embedding and loss were free.

Expected: give the last stage fewer layers
"""


def choose_layout(num_layers, pipeline_model_parallel_size, layer_times):
    p = pipeline_model_parallel_size
    counts = [num_layers // p + (stage < num_layers % p) for stage in range(p)]
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)
