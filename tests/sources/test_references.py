"""What two API references say of names, places and defaults: `pipeline_parallel` and `combined_1f1b`.

Each function is read off the reference in one line, as Python would write it. Ours must take the same
arguments, at the same places, with the same defaults; what it leaves out it takes with that default.
"""

import inspect

import pytest

from minimegatron.core.left_out_record import record
from minimegatron.core.pipeline_parallel import combined_1f1b, p2p_communication, schedules
from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

LETTERS = {
    LayerType.embedding: "E",
    LayerType.decoder: "t",
    LayerType.mtp: "m",
    LayerType.loss: "L",
}

SCHEDULE = (
    "*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
    "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
    "adjust_tensor_shapes_fn=None, {communicator}pg_collection=None"
)
PLAIN = SCHEDULE.format(communicator="")
PIPELINED = SCHEDULE.format(communicator="p2p_communicator=None, ")

PIPELINE_PARALLEL = {
    schedules: {
        "backward_step": "input_tensor, output_tensor, output_tensor_grad, model_type, config",
        "check_first_val_step": "first_val_step, forward_only, cond",
        "clear_embedding_activation_buffer": "config, model, is_last_stage",
        "convert_schedule_table_to_order": (
            "num_warmup_microbatches, num_model_chunks, schedule_table"
        ),
        "custom_backward": "output, grad_output",
        "deallocate_output_tensor": "out, deallocate_pipeline_outputs=False",
        "finish_embedding_wgrad_compute": "config, embedding_module, is_last_stage, tp_group",
        "forward_backward_no_pipelining": PLAIN,
        "forward_backward_pipelining_with_interleaving": PIPELINED,
        "forward_backward_pipelining_without_interleaving": PIPELINED,
        "forward_step": (
            "forward_step_func, data_iterator, model, num_microbatches, input_tensor, "
            "forward_data_store, config, cp_group_size, collect_non_loss_data=False, "
            "checkpoint_activations_microbatch=None, is_first_microbatch=False, "
            "current_microbatch=None, vp_stage=None, is_last_stage=True"
        ),
        "forward_step_calc_loss": (
            "model, output_tensor, loss_func, config, vp_stage, collect_non_loss_data, "
            "num_microbatches, forward_data_store, cp_group_size=None, is_last_stage=None"
        ),
        "get_forward_backward_func": "",
        "get_pp_rank_microbatches": (
            "num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage, "
            "forward_only=False, overlap_moe_expert_parallel_comm=False, p2p_communicator=None"
        ),
        "get_schedule_table": (
            "num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage"
        ),
        "get_tensor_shapes": (
            "*, seq_length, micro_batch_size, decoder_seq_length, config, tp_group, cp_group"
        ),
        "set_current_microbatch": "model, microbatch_id",
    },
    p2p_communication: {
        "P2PCommunicator": "pp_group, config",
        "P2PCommunicator.recv_backward": "self, tensor_shapes, is_last_stage",
        "P2PCommunicator.recv_forward": "self, tensor_shapes, is_first_stage",
        "P2PCommunicator.send_backward": "self, input_tensor_grads, is_first_stage",
        "P2PCommunicator.send_backward_recv_backward": (
            "self, input_tensor_grad, recv_next, tensor_shape, overlap_p2p_comm=False"
        ),
        "P2PCommunicator.send_backward_recv_forward": (
            "self, input_tensor_grads, tensor_shapes, is_first_stage"
        ),
        "P2PCommunicator.send_forward": "self, output_tensors, is_last_stage",
        "P2PCommunicator.send_forward_backward_recv_forward_backward": (
            "self, output_tensor, input_tensor_grad, recv_prev, recv_next, tensor_shape"
        ),
        "P2PCommunicator.send_forward_recv_backward": (
            "self, output_tensors, tensor_shapes, is_last_stage"
        ),
        "P2PCommunicator.send_forward_recv_forward": (
            "self, output_tensor, recv_prev, tensor_shape, overlap_p2p_comm=False"
        ),
        "is_single_shape": "x",
    },
}
COMBINED = {
    combined_1f1b: {
        "combined_1f1b_schedule_for_no_pipelining": (
            "forward_step_func, data_iterator, model, num_microbatches, input_tensor, "
            "output_tensor_grad, forward_data_store, config, collect_non_loss_data, first_val_step, "
            "forward_only, no_sync_func, total_num_tokens, check_first_val_step"
        ),
        "combined_1f1b_schedule_for_interleaved_pipelining": (
            "config, forward_step_func, data_iterator, model, num_microbatches, forward_data_store, "
            "forward_step_helper_preprocess, forward_step_helper_postprocess, "
            "backward_step_helper_preprocess, backward_step_helper_postprocess, "
            "get_microbatch_id_in_model_chunk, get_model_chunk_id, check_first_val_step, "
            "is_first_microbatch_for_model_chunk, collect_non_loss_data, "
            "f_virtual_microbatch_id=None, b_virtual_microbatch_id=None, pre_forward=None, "
            "pre_backward=None, post_forward=None, post_backward=None"
        ),
        "combined_forward_backward_step": (
            "forward_step_func, data_iterator, f_model, num_microbatches, input_tensor, "
            "forward_data_store, b_model, b_input_tensor, b_output_tensor, b_output_tensor_grad, "
            "config, f_model_chunk_id=None, pre_forward=None, pre_backward=None, post_forward=None, "
            "post_backward=None, collect_non_loss_data=False, "
            "checkpoint_activations_microbatch=None, is_first_microbatch=False, "
            "current_microbatch=None, encoder_decoder_xattn=False"
        ),
    }
}
ALL = [
    (module, name, text)
    for reference in (PIPELINE_PARALLEL, COMBINED)
    for module, of_module in reference.items()
    for name, text in of_module.items()
]


def in_the_reference(text: str) -> inspect.Signature:
    scope: dict = {}
    exec(f"def function({text}): ...", scope)
    return inspect.signature(scope["function"])


@pytest.mark.parametrize(
    ("module", "name", "text"), ALL, ids=lambda x: getattr(x, "__name__", x)[:60]
)
def test_arguments_have_the_references_names_places_and_defaults(module, name, text):
    ours = module
    for part in name.split("."):
        ours = getattr(ours, part)
    found, wanted = inspect.signature(ours).parameters, in_the_reference(text).parameters
    left_out = record().get(f"{module.__name__.removeprefix('minimegatron.')}.{name}")
    accepted = {} if left_out is None else left_out.left_out
    kept = [argument for argument in wanted if argument not in accepted]
    assert list(found)[: len(kept)] == kept
    for argument in kept:
        assert found[argument].default == wanted[argument].default, argument
        assert (found[argument].kind, argument) == (wanted[argument].kind, argument)
    for argument in list(found)[len(kept) :]:  # what is ours, or newer than the reference
        assert found[argument].default is not inspect.Parameter.empty, argument
    for argument in accepted.keys() & wanted.keys():
        assert accepted[argument].takes(wanted[argument].default), argument
    if left_out is not None and left_out.order:
        assert list(left_out.order)[: len(wanted)] == list(wanted)


def test_the_layout_of_the_reference_is_the_table_of_the_reference():
    """62 layers on 16 stages of two chunks, and a chunk without a layer."""
    layout = PipelineParallelLayerLayout.from_str("Et*3|(tt|)*29,m|L", 16).layout
    assert len(layout) == 16 and {len(chunks) for chunks in layout} == {2}
    words = [["".join(LETTERS[kind] for kind in chunk) for chunk in chunks] for chunks in layout]
    assert words == [["Ettt", "tt"], *([["tt", "tt"]] * 13), ["tt", "m"], ["tt", "L"]]
    assert PipelineParallelLayerLayout.from_str("E||t|L", 4).layout[1] == [[]]


def test_the_order_of_the_reference():
    """p = 2, v = 2, three microbatches of a chunk in a row, five in all, five forwards first."""
    table = schedules.get_schedule_table(5, 2, 3)
    assert [microbatch for microbatch, _ in table] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in table] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    order = schedules.convert_schedule_table_to_order(5, 2, table)
    assert order == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
