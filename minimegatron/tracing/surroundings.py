"""Where a rank stands, and which plan its step should follow: read off the calls and the groups.

Megatron has no counterpart.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.orders.orders import (
    COMBINED,
    INTERLEAVED,
    NO_PIPELINING,
    placement_of,
)
from minimegatron.core.pipeline_parallel.utils import get_tensor_shapes
from minimegatron.core.tracing import Call
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.core.utils import get_model_config, unwrap_model
from minimegatron.planner.links import config_of_run, schedule_of_run
from minimegatron.planner.mtp_costs import message_factors, stages_of_layout
from minimegatron.planner.plan import plan_config_to_json
from minimegatron.planner.stack_costs import messages_of_model
from minimegatron.tracing.pace import Pace, current_pace
from minimegatron.tracing.rank_trace import AXES


class Surroundings:
    """Coordinates of this rank, and sizes of the axes, as far as they have been seen."""

    def __init__(self):
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.pace: Pace | None = None
        self.coordinates, self.sizes = dict.fromkeys(AXES, 0), dict.fromkeys(AXES, 1)
        if parallel_state.model_parallel_is_initialized():
            self._read_groups({axis: parallel_state.get_group(axis) for axis in AXES})

    def _read_groups(self, groups: dict[str, Any]) -> None:
        for axis, group in groups.items():
            if group is not None:
                self.coordinates[axis], self.sizes[axis] = group.rank(), group.size()

    def learn(self, call: Call) -> dict[str, Any]:
        """Reads a schedule's arguments; returns the config of the plan that it should follow."""
        arguments = call.arguments
        self.pace = current_pace() or self.pace
        collection, p2p = arguments.get("pg_collection"), arguments.get("p2p_communicator")
        if collection is not None:
            self._read_groups({axis: getattr(collection, axis, None) for axis in AXES})
        if p2p is not None:
            self._read_groups({"pp": p2p.pp_group})
        return self._plan_config(call)

    def _plan_config(self, call: Call) -> dict[str, Any]:
        arguments, attributes = call.arguments, call.attributes
        model = arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        schedule = schedule_of_run(call.symbol, attributes)
        is_written = schedule in (NO_PIPELINING, INTERLEAVED)
        if (
            is_written
            and config.overlap_moe_expert_parallel_comm
            and not arguments.get("forward_only")
        ):
            schedule = COMBINED
        return plan_config_to_json(
            config_of_run(
                schedule,
                self.sizes["pp"],
                arguments["num_microbatches"],
                len(chunks),
                group_size=config.microbatch_group_size_per_vp_stage,
                forward_only=bool(arguments.get("forward_only")),
                overlap_p2p_comm=config.overlap_p2p_comm,
                batch_p2p_comm=config.batch_p2p_comm,
                message_bytes=self._message_bytes(
                    config, arguments, schedule in (INTERLEAVED, COMBINED)
                ),
                wire=attributes.get("wire"),
                message_factors=self._message_factors(config),
                message_sizes=self._message_sizes(chunks[0], arguments),
            )
        )

    def _message_sizes(self, model: Any, arguments: dict[str, Any]) -> Any:
        """Of each stage, of all that it sends on, where the model says that this may be two tensors."""
        if self.sizes["pp"] == 1:
            return None
        config = get_model_config(model)
        encoder_bytes = self._message_bytes(
            config, arguments, True
        )  # one length, as interleaving's
        decoder_bytes = self._message_bytes(config, arguments, False)
        return messages_of_model(unwrap_model(model), encoder_bytes, decoder_bytes)

    def _message_factors(self, config: Any) -> tuple[int, ...] | None:
        """Behind a stage of its own for further tokens messages are longer, if there are gradients."""
        if not (config.mtp_standalone and torch.is_grad_enabled()):
            return None
        layout = config.pipeline_model_parallel_layout
        if not isinstance(layout, PipelineParallelLayerLayout):
            layout = PipelineParallelLayerLayout(layout, self.sizes["pp"], placement_of(config))
        return message_factors(stages_of_layout(layout))

    def _message_bytes(self, config: Any, arguments: dict[str, Any], is_interleaved: bool) -> int:
        """Bytes between two stages; 0 where there are none, or where they are not known ahead.

        Of two lengths it is the shorter one: `_message_factors` says where the other travels.
        """
        is_fixed = arguments.get("adjust_tensor_shapes_fn") is None
        if self.sizes["pp"] == 1 or config.variable_seq_lengths or not is_fixed:
            return 0
        if config.mtp_standalone:  # shapes are sent ahead, but they are known all the same
            config = copy.copy(config)
            config.mtp_standalone = False
        (shape,) = get_tensor_shapes(
            seq_length=arguments["seq_length"],
            micro_batch_size=arguments["micro_batch_size"],
            decoder_seq_length=None if is_interleaved else arguments.get("decoder_seq_length"),
            config=config,
            tp_group=_Size(self.sizes["tp"]),
            cp_group=_Size(self.sizes["cp"]),
        )
        elements = 1
        for size in shape:
            elements *= size
        return elements * config.pipeline_dtype.itemsize


class _Size:
    """As much of a process group as a shape depends on."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size
