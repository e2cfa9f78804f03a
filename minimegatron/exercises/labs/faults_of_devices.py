"""Known mistakes in what ranks do otherwise on a GPU, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_DEVICES = (
    Fault(
        "gradients-noted-and-not-looked-at",
        "core/optimizer/optimizer.py",
        "        for check in self.grad_checks:\n            check()\n",
        "",
        "On a GPU, a NaN in a gradient is noted, and the weights are updated with it.",
    ),
    Fault(
        "sizes-of-the-first-batch",
        "core/tensor_parallel/sizes_of_first_batch.py",
        "    if group.rank() == 0 and shapes != ",
        "    if group.rank() < 0 and shapes != ",
        "On a GPU, a batch of another size is cut into pieces of the first batch's sizes.",
    ),
    Fault(
        "count-of-steps-on-the-cpu",
        "core/optimizer/optimizer_state.py",
        'main_param.device if device_is_asynchronous() else "cpu"',
        '"cpu"',
        "On a GPU, the first update after a checkpoint was loaded reads the CPU's memory in a kernel.",
    ),
    Fault(
        "all-ranks-on-the-laptops-gpu",
        "training/devices.py",
        '    if without or (sharing and device == "auto"):\n',
        "    if without:\n",
        "Ranks that nobody has told to do so share one GPU, and may be slower than the CPU.",
    ),
    Fault(
        "waits-for-a-gpu-that-waits",
        "tracing/to_events.py",
        "wait_for_gpu=end is not None)",
        "wait_for_gpu=True)",
        "After an error, a recording waits for messages that nobody sends any more.",
    ),
)
