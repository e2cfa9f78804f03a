"""The average time of a stage is computed with torch.

Expected: torch.tensor is used: this part is checked without numpy and torch; use plain Python
"""

import torch


def choose_layout(num_layers, pipeline_model_parallel_size, layer_times):
    p = pipeline_model_parallel_size
    times = torch.tensor([layer_times["decoder"]] * num_layers)
    average = times.sum() / p
    stages = ["t" * round(average / layer_times["decoder"]) for _ in range(p)]
    return "|".join(stages)
