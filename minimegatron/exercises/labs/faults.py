"""Known mistakes, each as a patch of a line or two: the answer key of the "break it" labs.

The labs apply one to a copy of the package and let the student predict what breaks.
`tests/test_mutations.py` applies each in turn and demands that the tests notice, so a lab cannot
rot. Megatron has no counterpart. The tour's pages cite threads about several of these mistakes.
"""

from minimegatron.exercises.labs.fault import Fault, apply_fault, patched
from minimegatron.exercises.labs.other_faults import OTHER_FAULTS

__all__ = ["FAULTS", "FORMER_NAMES", "Fault", "apply_fault", "patched"]

FORMER_NAMES = {"shape-of-another-direction": "full-sequence-buffer"}
"""Names that labs had once: students' folders and lecture notes have them."""

_PP = "core/pipeline_parallel/"
_TP = "core/tensor_parallel/"
_DDP = "core/distributed/"

FAULTS = (
    # -- Schedules --
    Fault(
        "backward-of-the-newest",
        _PP + "steps.py",
        "next(iter(self._in_flight))",
        "next(reversed(self._in_flight))",
        "Backwards take the newest microbatch. The gradient that arrives belongs to the oldest.",
    ),
    Fault(
        "one-warm-up-too-many",
        _PP + "loops.py",
        "num_warmup_microbatches = min(num_stages - stage - 1, num_microbatches)",
        "num_warmup_microbatches = min(num_stages - stage, num_microbatches)",
        "Every stage does one forward more before its first backward. Nobody waits for that and all "
        "numbers stay right, but every stage holds one microbatch more than it must.",
    ),
    Fault(
        "warm-up-not-clamped",
        _PP + "loops.py",
        "num_warmup_microbatches = min(num_stages - stage - 1, num_microbatches)",
        "num_warmup_microbatches = num_stages - stage - 1",
        "With fewer microbatches than stages, the first stages ask for microbatches that do not "
        "exist: the data iterator raises StopIteration.",
    ),
    Fault(
        "interleaved-warm-up-once",
        _PP + "schedule_table.py",
        "num_warmup = 2 * (pp_size - pp_rank - 1)\n",
        "num_warmup = pp_size - pp_rank - 1\n",
        "The 2 in 2(p - r - 1) forwards of warm-up is gone. In the exchange that moves activations "
        "and gradients together, the ranks wait for each other for ever.",
    ),
    Fault(
        "backward-chunks-in-forward-order",
        _PP + "schedule_table.py",
        "return chunk if forward else self.num_model_chunks - 1 - chunk",
        "return chunk",
        "The first chunk's backward comes before its gradient, which only the last chunk's backward "
        "makes: taking it from an empty queue raises an IndexError.",
    ),
    Fault(
        "one-receive-too-many",
        _PP + "schedule_table.py",
        "if k + 1 == self.counts.total:",
        "if k + 1 == self.counts.total + 1:",
        "After its last forward a stage still asks what to receive next: that forward's number is "
        "not in the table, which raises an IndexError.",
    ),
    Fault(
        "short-group-allowed",
        _PP + "interleaving_checks.py",
        "if 0 < M % G < p:",
        "if False:",
        "A last group shorter than the pipeline is let through. A forward then comes before its "
        "input has arrived: taking it from an empty queue raises an IndexError.",
    ),
    Fault(
        "chunks-share-an-iterator",
        _PP + "schedules.py",
        "            data_iterator[chunk_id],\n",
        "            data_iterator[0],\n",
        "All chunks read one iterator, which has each microbatch once: it is used up too early, and "
        "raises StopIteration.",
    ),
    Fault(
        "input-of-another-chunk",
        _PP + "loops.py",
        "self._inputs[next_input.model_chunk_id].append((received, None))",
        "self._inputs[0].append((received, None))",
        "Whatever arrives is taken for the first chunk's input. The second chunk's forward finds no "
        "input: taking it from an empty queue raises an IndexError.",
    ),
    Fault(
        "all-stages-send-first",
        _PP + "p2p_communication.py",
        "if self.curr_rank_in_pg % 2:",
        "if False:",
        "Without the even/odd order every stage of the ring sends first. On a wire where a send "
        "waits for its receive, the ranks then wait for each other for ever.",
    ),
    Fault(
        "batched-ring-of-two",
        _PP + "p2p_checks.py",
        "    if num_stages == 2 and has_chunks",
        "    if False and has_chunks",
        "Interleaving over two stages in batches is let through; tensors can cross.",
    ),
    Fault(
        "batch-in-another-order",
        _PP + "p2p_communication.py",
        'order = ("send_prev", "recv_prev", "send_next", "recv_next")',
        'order = ("send_next", "recv_prev", "send_prev", "recv_next")',
        "A batch lists its messages in another order than plan and Megatron.",
    ),
    Fault(
        "empty-batch-is-started",
        _PP + "message_batches.py",
        "        if not messages:  # NCCL refuses an empty batch\n            return []\n",
        "",
        "An exchange with nothing in it starts a batch of no messages, which NCCL refuses.",
    ),
    Fault(
        "odd-stages-swap-half",
        _PP + "p2p_communication.py",
        'order = ("recv_prev", "send_next", "recv_next", "send_prev")',
        'order = ("recv_prev", "send_next", "send_prev", "recv_next")',
        "Odd stages receive activations first, but gradients last; a ring of two then stands still.",
    ),
    Fault(
        "gradient-to-the-next-stage",
        _PP + "p2p_communication.py",
        'peer = self.next_rank if name in ("send_next", "recv_next") else self.prev_rank',
        "peer = self.next_rank",
        "Whatever a stage exchanges, its partner is the next stage. So a stage waits for its input "
        "from the stage after it, which waits in the same way: the ranks wait for each other for "
        "ever, before there is any gradient.",
    ),
    Fault(
        "freed-while-being-sent",
        _PP + "message_batches.py",
        "tensor=message.tensor.detach().contiguous()",
        "tensor=message.tensor",
        "The message shares the output that is freed next; one that is slow to leave has one element.",
    ),
    Fault(
        "input-without-gradient",
        _PP + "p2p_communication.py",
        "requires_grad=message.payload == ACTIVATION,",
        "requires_grad=False,",
        "The input that arrives does not ask for a gradient. So there would be nothing to send back; "
        "`retain_grad` raises a RuntimeError.",
    ),
    Fault(
        "full-sequence-buffer",
        _PP + "p2p_communication.py",
        "    if config.sequence_parallel:\n        length //= tp_group.size()\n",
        "",
        "The buffer is for the whole sequence, but a part is sent: the receive raises an error.",
    ),
    Fault(
        "received-in-another-dtype",
        _PP + "p2p_communication.py",
        "            dtype=self.config.pipeline_dtype,\n",
        "            dtype=torch.float32,\n",
        "The receive buffer has another dtype than what is sent: as many numbers, other bytes.",
    ),
    Fault(
        "peer-in-the-world",
        _PP + "p2p_communication.py",
        "return dist.isend(message.tensor, group=group, group_dst=message.peer, tag=tag)",
        "return dist.isend(message.tensor, dst=message.peer, group=group, tag=tag)",
        "A stage's number is taken for a rank: right only where the pipeline is the whole world.",
    ),
    # -- One microbatch --
    Fault(
        "loss-not-divided-by-microbatches",
        _PP + "steps.py",
        "output_tensor / or_one(num_tokens) / num_microbatches",
        "output_tensor / or_one(num_tokens)",
        "Gradients are M times too large. Adam hides it; clipping, Adam's epsilon and SGD do not.",
    ),
    Fault(
        "report-changed-in-place",
        _PP + "steps.py",
        "output_tensor = output_tensor / or_one(num_tokens) / num_microbatches",
        "output_tensor.div_(or_one(num_tokens)).div_(num_microbatches)",
        "The loss is scaled in place, and with it the `loss.detach()` that the log shows.",
    ),
    Fault(
        "masked-microbatch-divides-by-zero",
        _PP + "steps.py",
        "or_one(num_tokens)",
        "num_tokens",
        "A microbatch whose tokens are all masked turns every gradient into NaN.",
    ),
    Fault(
        "context-ranks-forgotten",
        _PP + "user_results.py",
        "output_tensor * cp_group_size / num_microbatches",
        "output_tensor / num_microbatches",
        "A mean over all context-parallel ranks is averaged again: gradients are c times too small.",
    ),
    Fault(
        "loss-scale-on-every-stage",
        _PP + "steps.py",
        "if grad is None and config.grad_scale_func is not None:",
        "if config.grad_scale_func is not None:",
        "Each stage scales before its backward: gradients of stage r carry the scale p - r times.",
    ),
    Fault(
        "checked-backward-of-a-freed-output",
        _PP + "steps.py",
        "        custom_backward(output, grad)\n",
        "        torch.autograd.backward(output, grad_tensors=grad)\n",
        "torch compares the gradient's shape with that of an output that was freed.",
    ),
    Fault(
        "views-are-freed",
        _PP + "steps.py",
        "if out._base is not None:",
        "if False:",
        "Freeing a view frees nothing: its base keeps the memory, and nobody notices.",
    ),
    # -- Tensor parallelism --
    Fault(
        "input-gradient-not-summed",
        _TP + "layers.py",
        "        if ctx.allreduce_dgrad:\n",
        "        if False:\n",
        "Each rank passes back its own term of the input's gradient, not the sum.",
    ),
    Fault(
        "bias-on-every-rank",
        _TP + "layers.py",
        "output = reduce_from_tensor_model_parallel_region(output, self.tp_group)",
        "output = reduce_from_tensor_model_parallel_region("
        "output + (0 if self.bias is None else self.bias), self.tp_group)",
        "The row-parallel bias is added to each rank's term before the sum, and once more after it: "
        "t + 1 times. While biases are 0 the loss is right, but the bias's gradient is doubled.",
    ),
    Fault(
        "foreign-tokens-not-masked",
        _TP + "layers.py",
        "output_parallel = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)",
        "output_parallel = found",
        "A token of another rank's vocabulary adds this rank's row 0: the loss is wrong.",
    ),
    Fault(
        "softmax-of-a-part",
        _TP + "cross_entropy.py",
        "collectives.all_reduce(normaliser, group)",
        "pass",
        "Each rank normalises over its own part of the vocabulary: the loss is wrong.",
    ),
    Fault(
        "sequence-parallel-gradient-not-scattered",
        _TP + "layers.py",
        "reducing = collectives.reduce_scatter(grad_input, of_this_rank, group, async_op=True)",
        "grad_input.copy_(of_this_rank.chunk(group.size())[group.rank()])",
        "The input's gradient is cut but not summed.",
    ),
    Fault(
        "same-draw-on-every-rank",
        _TP + "initial_weights.py",
        "weight.copy_(shard_parameter(full, weight, tp_rank, tp_size))",
        "weight.copy_(shard_parameter(full, weight, 0, tp_size))",
        "All ranks start from the first rank's piece. Weights repeat themselves: the loss is wrong.",
    ),
    # -- Placement --
    Fault(
        "chunks-laid-out-by-rank",
        "core/transformer/layer_placement.py",
        "return placement_of(config).stage_of(pp_rank, vp_stage or 0)",
        "return pp_rank * (config.virtual_pipeline_model_parallel_size or 1) + (vp_stage or 0)",
        "A rank's chunks are taken for neighbours. Layers come in another order: the loss is wrong.",
    ),
    Fault(
        "remainder-of-layers-dropped",
        "core/transformer/layer_checks.py",
        "    if total % p:\n",
        "    if False:\n",
        "Ten layers over four stages become eight. The model trains, two layers short.",
    ),
    Fault(
        "only-members-make-groups",
        "core/parallel_state.py",
        "        group = dist.new_group(\n",
        "        group = None if me not in ranks else dist.new_group(\n",
        "Making a group is collective over the world: those who skip leave the others waiting.",
    ),
    Fault(
        "embedding-group-of-all-stages",
        "core/rank_generator.py",
        '        "embd": get_embedding_ranks or default_embedding_ranks,',
        '        "embd": get_embedding_ranks or list,',
        "Middle stages join the sum of the tied embedding's gradients, but have no such weight, which "
        "raises a RuntimeError.",
    ),
    # -- Gradients over ranks --
    Fault(
        "gradients-overwritten",
        _DDP + "distributed_data_parallel.py",
        "param.main_grad.add_(param.grad)",
        "param.main_grad.copy_(param.grad)",
        "Each microbatch's gradient replaces the one before. Only the last microbatch counts.",
    ),
    Fault(
        "gradients-not-averaged",
        _DDP + "distributed_data_parallel.py",
        "else divided / num_ranks",
        "else 1.0",
        "The sum over d data-parallel ranks is not divided by d: gradients are d times too large.",
    ),
    Fault(
        "no-sync-forgotten",
        _PP + "step_frame.py",
        "                held.enter_context(function())\n",
        "                pass\n",
        "Buckets leave after the first microbatch. What comes later would stay on its rank and make "
        "the replicas different models; here the gradient buffer notices and raises a RuntimeError.",
    ),
    Fault(
        "unused-parameter-not-noticed",
        _DDP + "param_and_grad_buffer.py",
        "is_late = force_all_reduce or self.grad_reduce_handles is None",
        "is_late = force_all_reduce",
        "A bucket that waits for a gradient that never comes is never summed.",
    ),
    Fault(
        "gradients-in-low-precision",
        _DDP + "distributed_data_parallel.py",
        "in_fp32 = self.ddp_config.grad_reduce_in_fp32 and param.dtype in HALF_DTYPES",
        "in_fp32 = False",
        "bf16 has 8 significant binary digits: after some microbatches, the next microbatch's "
        "gradient is rounded away.",
    ),
    Fault(
        "tied-embedding-among-others",
        _DDP + "param_and_grad_buffer.py",
        "return self.ddp_config.use_distributed_optimizer and has_copies\n",
        "return False and has_copies\n",
        "The tied embedding's shards lie elsewhere on the last stage than on the first: the sum adds "
        "elements that do not belong together.",
    ),
    Fault(
        "tied-embedding-not-summed",
        _DDP + "finalize_model_grads.py",
        "            all_reduce(total, embd_group)\n",
        "            pass\n",
        "The first and the last stage each keep their own part of the tied weight's gradient, and "
        "would update their copies differently.",
    ),
    Fault(
        "norm-gradients-not-summed",
        _DDP + "finalize_model_grads.py",
        "            all_reduce(together, group)\n",
        "",
        "Under sequence parallelism each rank's norm layers have seen a part of the sequence only, so "
        "each rank has only a term of their gradient.",
    ),
    Fault(
        "norm-gradients-averaged",
        _DDP + "finalize_model_grads.py",
        "            all_reduce(together, group)\n",
        "            all_reduce(together, group)\n            together.div_(group.size())\n",
        "Each rank's part of the sequence gives a term of the gradient of the norm layers, not an "
        "estimate of it: averaged, it is t times too small.",
    ),
    Fault(
        "tokens-of-one-replica",
        _DDP + "token_division.py",
        "    all_reduce(num_tokens, dp_cp_group)\n",
        "",
        "Each replica divides the gradient, a sum over all replicas, by its own tokens only: "
        "gradients are too large, and differ from replica to replica.",
    ),
    Fault(
        "tokens-of-every-stage",
        _DDP + "token_division.py",
        "    broadcast(num_tokens, last_stage, pp_group)\n",
        "",
        "Only the last stage counts tokens. The other stages divide their gradients by 1.",
    ),
    # -- Optimizer --
    Fault(
        "clipped-by-the-local-norm",
        "core/optimizer/clip_grads.py",
        "return _reduce_over(total, grad_stats_parallel_group, ReduceOp.SUM) ** (1.0 / norm_type)",
        "return total.item() ** (1.0 / norm_type)",
        "Each rank clips by the norm of its own part of the gradient, so the ranks' copies of one "
        "weight become different.",
    ),
    Fault(
        "shared-weight-counted-twice",
        "core/optimizer/optimizer.py",
        'if getattr(param, "shared", False):',
        "if False:",
        "The tied embedding's gradient is in the norm twice, so gradients are clipped too much.",
    ),
    Fault(
        "replicas-counted-often",
        _TP + "sharding.py",
        "return is_parallel or tensor_model_parallel_rank(tp_group) == 0",
        "return True",
        "The gradients of weights that every tensor-parallel rank holds are in the norm t times: it "
        "is too large, and gradients are clipped too much.",
    ),
    Fault(
        "overflow-seen-by-one-rank",
        "core/optimizer/optimizer.py",
        "            all_reduce(found_inf, group, ReduceOp.MAX)\n",
        "            pass\n",
        "One rank skips the step and the others do not.",
    ),
    *OTHER_FAULTS,
)
