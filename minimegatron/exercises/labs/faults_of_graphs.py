"""Known mistakes around a step that is captured and replayed, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_WRAPPER = "core/full_cuda_graph.py"
_RECORDER = "core/recorded_graph.py"

FAULTS_OF_GRAPHS = (
    Fault(
        "static-buffer-rebound",
        _WRAPPER,
        'self._fill(buffers[microbatch], inputs, f"microbatch {microbatch} of {stage}")',
        "buffers[microbatch] = copy_tensors_in_struct(inputs)",
        "A microbatch gets new memory in each step, and the graph goes on reading the old one. All "
        "replays learn from the batch that was there at the capture; the loss falls all the same, "
        "faster than it should.",
    ),
    Fault(
        "capture-without-replay",
        _WRAPPER,
        "        if here.cuda_graph[stage] is None:\n            run()",
        "        if here.captured_call[stage] is call:\n            pass\n"
        "        elif here.cuda_graph[stage] is None:\n            run()",
        "The step in which the graph is captured is never computed: its gradients are zero, and its "
        "losses are what was in that memory before.",
    ),
    Fault(
        "first-replay-twice",
        _WRAPPER,
        "= self._graph_maker.capture(run)",
        "= self._graph_maker.capture(run)\n        FullCudaGraphWrapper.cuda_graph[stage].replay()",
        "The captured step is computed twice, and its gradients are added up twice. Later steps are "
        "right.",
    ),
    Fault(
        "one-graph-for-both",
        _WRAPPER,
        'stage = STAGES[kwargs["forward_only"]]',
        "stage = STAGES[0]",
        "Evaluation replays the graph of training: it has the losses of a step of training, and its "
        "backwards add to gradients that the next step may find.",
    ),
    Fault(
        "graph-result-not-cloned",
        "training/training.py",
        "summed = sum_over_microbatches(losses_reduced)",
        'late = vars(train_step).setdefault("late", [losses_reduced])\n'
        "    summed = sum_over_microbatches(late.pop())\n"
        "    late.append(losses_reduced)",
        "A step's losses are kept and read after the next step. Without a graph the log is one step "
        "late; with one it shows the later step's losses, under the wrong number.",
    ),
    Fault(
        "graph-of-other-sizes",
        _WRAPPER,
        "            _refuse_another_call(stage, here.captured_call[stage], call)",
        "            pass",
        "A step with more microbatches replays the graph of fewer, and nobody sees the others. With "
        "fewer, old microbatches count again.",
    ),
    Fault(
        "labels-unseen-by-a-graph",
        "training/captured_step.py",
        "get_args().cuda_graph_warmup_steps, check_inputs=_check_inputs",
        "get_args().cuda_graph_warmup_steps",
        "A label that is no token passes: a captured step does not look at its numbers, and nobody "
        "looks at them as they are read.",
    ),
    Fault(
        "graph-of-the-last-run",
        "training/next_run.py",
        "    destroy_full_cuda_graphs()\n",
        "",
        "A second run in the same process replays the first one's graph, whose weights are not its "
        "own, or is refused.",
    ),
    Fault(
        "capture-leaves-its-gradients",
        _RECORDER,
        "                recorder.restore()\n",
        "                pass\n",
        "What the capture has computed stays in the gradient buffers, and the first replay adds the "
        "same gradients again. On a GPU a capture computes nothing.",
    ),
    Fault(
        "graph-follows-the-tensor",
        _RECORDER,
        "aliases = _each_tensor((args, kwargs), torch.Tensor.detach)",
        "aliases = (args, kwargs)",
        "The record holds tensors, not their memory. An output that was freed by `tensor.data = ...` "
        "has one element when it is replayed.",
    ),
)
