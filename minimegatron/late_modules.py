"""Modules that are loaded when somebody first uses them, not where they are imported.

Torch-free. Megatron has no counterpart: it imports everything at once. A module of a second subject, or
of refusals, is imported on the page that may need it, as any other:

    from minimegatron.core import group_checks

If `LATE` names it, the package `minimegatron.core` has a stand-in of that name, from its own import on
(`left_out.OurModules`). The first look-up in the stand-in imports the module. A run that never needs
it does not load it, and what it imports, either. `from minimegatron.core.group_checks import ...` loads
it at once.
"""

import importlib
from types import ModuleType
from typing import Any

LATE = {
    "core": ["activations", "full_cuda_graph", "straggler_words", "words"],
    "core.datasets": ["atomic_file", "blended_dataset", "indexed_dataset", "wordpiece_tokenizer"],
    "core.dist_checkpointing": ["core"],
    "core.distributed": ["embedding_copies", "grad_checks", "torch_ddp"],
    "core.models.common": ["model_chunk_schedule_plan"],
    "core.models.common.embeddings": ["embedding_checks", "token_types"],
    "core.models.gpt": ["moe_module_specs"],
    "core.optimizer": ["other_norms"],
    "core.orders": ["lowering", "orders", "planned_schedule", "runnable"],
    "core.pipeline_parallel": ["combined_1f1b", "hooked_frame", "user_results"],
    "core.rerun": ["data_iterator", "differences", "random_numbers", "step_runs", "two_runs"],
    "core.tensor_parallel": [
        "autocast_casts",
        "frozen_weight",
        "label_smoothing",
        "recompute",
        "sizes_of_first_batch",
        "standalone_regions",
        "target_checks",
        "uneven_rows",
    ],
    "core.transformer": [
        "block_recompute",
        "context_parallel",
        "cross_attention",
        "mlp_variants",
        "multi_token_prediction",
        "pipeline_parallel_layer_layout",
        "rms_norm",
        "sharded_state",
        "transformer_block_checks",
        "zigzag",
    ],
    "core.transformer.moe": ["expert_bias", "moe_logging", "moe_utils"],
    "doctor": ["flight_recorder", "processes", "records", "session"],
    "launching": ["user_file"],
    "planner": ["unreceived"],
    "tracing": ["pace", "recorder"],
    "training": [
        "batch_checks",
        "checkpoint_args",
        "checkpoint_folder",
        "checkpointing",
        "global_checks",
        "gpt_evaluation",
        "older_arguments",
        "params_norm",
        "report_checks",
        "rerun_state",
        "result_words",
        "text_generation",
    ],
    "training.datasets": ["random_sampler", "workers"],
    "training.families": ["bert_checks", "mamba_checks", "t5_checks"],
}
"""By package, below `minimegatron`: its late modules."""


def put_stand_ins(package: ModuleType) -> None:
    """Gives a package that is about to be run the stand-ins of its late modules."""
    for name in LATE.get(package.__name__.partition(".")[2], ()):
        setattr(package, name, StandIn(f"{package.__name__}.{name}"))


class StandIn:
    """Has all that a module has, and imports it when asked for the first time.

    Nothing is kept: what a test puts into the module is seen here too, and what it puts in here is in
    the module.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str):
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self._name), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(importlib.import_module(self._name), name)

    def __reduce__(self) -> tuple:
        # What is sent to another process names the module, as a module does.
        return importlib.import_module, (self._name,)

    @property
    def __dict__(self) -> dict[str, Any]:
        return vars(importlib.import_module(self._name))

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._name))

    def __repr__(self) -> str:
        return f"<stand-in of module {self._name!r}>"
