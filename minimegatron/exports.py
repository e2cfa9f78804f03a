"""Names and modules that are looked up on first use: what nobody uses is not loaded.

Torch-free. Megatron has no counterpart: it imports everything at once.

* Names. One of Megatron's may stand in a package whose import must stay cheap, or in a module that may
  not import the module where the name lives here. `lazily` gives such a place the two functions that
  Python asks for names (PEP 562).
* Modules. One of a second subject, or of refusals, is imported on the page that may need it, as any
  other:

      from minimegatron.core import group_checks

  If `LATE` names it, the package `minimegatron.core` has a stand-in of that name, from its own import
  on (`left_out.OurModules`). The first look-up in the stand-in imports the module. A run that never
  needs it does not load it, and what it imports, either.
  `from minimegatron.core.group_checks import ...` loads it at once.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# -- Names --


def lazily(
    place: str, table: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of the module `place`, for the names of `table`.

    `table` says where each name is found: "package.module" is a module, "package.module:attribute"
    is an attribute of one. In the module:

        __getattr__, __dir__ = lazily(__name__, {"pace": "minimegatron.tracing.pace:pace"})

    What is found is not kept: a test that puts another function in the module that has it sees that
    function here too, and the next look-up costs about a microsecond. `__getattr__` raises
    AttributeError for other names, and what the import of the module raises.

    >>> __getattr__, __dir__ = lazily("minimegatron", {"root": "math:sqrt", "text": "json"})
    >>> __getattr__("root")(9.0), __getattr__("text").__name__
    (3.0, 'json')
    >>> "root" in __dir__()
    True
    >>> __getattr__("log")
    Traceback (most recent call last):
    AttributeError: module 'minimegatron' has no attribute 'log'
    """

    def __getattr__(name: str) -> Any:
        if name not in table:
            # With the module and the name, Python adds "Did you mean ...?".
            module = sys.modules.get(place)
            raise AttributeError(
                f"module {place!r} has no attribute {name!r}", name=name, obj=module
            )
        module_name, _, attribute = table[name].partition(":")
        module = importlib.import_module(module_name)
        return getattr(module, attribute) if attribute else module

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[place]), *table})

    return __getattr__, __dir__


def all_of(place: str, module_name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """As `lazily`, for all names that the module `module_name` has in its `__all__`."""

    def __getattr__(name: str) -> Any:
        module = importlib.import_module(module_name) if not name.startswith("__") else None
        if module is None or name not in module.__all__:
            raise AttributeError(
                f"module {place!r} has no attribute {name!r}",
                name=name,
                obj=sys.modules.get(place),
            )
        return getattr(module, name)

    def __dir__() -> list[str]:
        names = importlib.import_module(module_name).__all__
        return sorted({*vars(sys.modules[place]), *names})

    return __getattr__, __dir__


# -- Modules --

LATE = {
    "": ["doctor", "launching", "planner", "tracing"],
    "core": [
        "activations",
        "dist_checkpointing",
        "full_cuda_graph",
        "straggler_words",
        "util_checks",
        "words",
    ],
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
        "attention_masks",
        "block_recompute",
        "context_parallel",
        "cross_attention",
        "mlp_variants",
        "moe",
        "mtp_loss",
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
        "captured_step",
        "checkpoint_args",
        "checkpoint_folder",
        "checkpointing",
        "global_checks",
        "gpt_evaluation",
        "params_norm",
        "report_checks",
        "rerun_state",
        "result_words",
        "text_generation",
    ],
    "training.datasets": ["random_sampler", "workers"],
    "training.families": ["bert_checks", "mamba_checks", "t5_checks"],
}
"""By package, below `minimegatron`: its late modules and packages."""


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
