"""Each stage gets num_layers // p layers; the rest is lost.

Expected: your string is not a layout of this model: t stands 12 times but num_layers is 13; add 1
Ettt|ttt|ttt|tttL ^
"""


def choose_layout(num_layers, pipeline_model_parallel_size, layer_times):
    p = pipeline_model_parallel_size
    stages = ["t" * (num_layers // p)] * p
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)
