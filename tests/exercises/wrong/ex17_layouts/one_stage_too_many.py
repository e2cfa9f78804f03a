"""The loss gets a stage of its own, beside the others.

Expected: your layout has 5 stages, but p is 4: write p - 1 bars, that is 3
"""


def choose_layout(num_layers, pipeline_model_parallel_size, layer_times):
    p = pipeline_model_parallel_size
    counts = [num_layers // p + (stage < num_layers % p) for stage in range(p)]
    return "E" + "|".join("t" * count for count in counts) + "|L"
