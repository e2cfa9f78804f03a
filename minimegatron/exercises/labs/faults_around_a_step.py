"""Known mistakes in what stands around a step's forwards and backwards, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault
from minimegatron.exercises.labs.faults_of_devices import FAULTS_OF_DEVICES
from minimegatron.exercises.labs.faults_of_names import FAULTS_OF_NAMES

_PP = "core/pipeline_parallel/"
_TP = "core/tensor_parallel/"
_DDP = "core/distributed/"

FAULTS_AROUND_A_STEP = (
    # -- The frame of a step --
    Fault(
        "hooks-of-each-chunk",
        _PP + "step_frame.py",
        "            config=self.config,\n",
        "",
        "Each chunk asks its own config for hooks: the last chunk's loss is not scaled.",
    ),
    Fault(
        "launched-by-backward-and-schedule",
        _PP + "hooked_frame.py",
        "                if chunk_id not in self._synchronized_chunks:\n",
        "                if True:\n",
        "The first stage's last backward has launched its gradients, and the step's end does so again.",
    ),
    Fault(
        "gradients-launched-without-backward",
        _PP + "hooked_frame.py",
        "        if not self.forward_only:\n            for chunk_id",
        "        if True:\n            for chunk_id",
        "A step without backwards sends gradients.",
    ),
    # -- Shared memory --
    Fault(
        "messages-of-a-failed-step",
        "backend/incoming.py",
        "        while messages and self._is_before(messages[0].epoch, epoch):\n",
        "        while False:\n",
        "What a failed step left unread is taken for a message of the next step.",
    ),
    Fault(
        "evaluation-of-one-copy-alone",
        "core/collectives.py",
        "    for group in (*groups, *others):\n",
        "    for group in groups:\n",
        "A loss that is averaged over the copies of the model is averaged with what a failed "
        "evaluation of another copy has left.",
    ),
    Fault(
        "hooks-that-keep-the-wrapper",
        "core/distributed/distributed_data_parallel.py",
        "        wrapper = weakref.ref(self)\n",
        "        wrapper = lambda: self  # noqa: E731\n",
        "A wrapper that nobody has any more is never freed, nor are its groups and their memory.",
    ),
    Fault(
        "failure-kept-secret",
        "backend/channels.py",
        "            self._tell(ABANDONED, text)\n",
        "            pass\n",
        "A rank that fails tells nobody; those that wait for it wait until the time-out.",
    ),
    Fault(
        "sends-that-never-wait",
        _PP + "p2p_communication.py",
        "while len(unfinished) >= self.send_limit:",
        "while False:",
        "In a forward-only step nothing holds the first stage back, and its messages pile up.",
    ),
    Fault(
        "every-message-lent",
        "backend/slots.py",
        "return len(self._lent) < (MOST_LARGE_LENT if num_bytes >= LARGE else 1)",
        "return True",
        "What a stage keeps for its backward stays in shared memory, which grows with the stages.",
    ),
    Fault(
        "anybody-may-call",
        "backend/handshake.py",
        "user == os.geteuid() and hmac.compare_digest(told, secret) and len",
        "len",
        "Whoever calls the socket counts as a rank, and gets the messages.",
    ),
    # -- Weight gradients after backward --
    Fault(
        "bucket-launched-while-a-gradient-is-owed",
        _DDP + "distributed_data_parallel.py",
        "more_follows = WeightGradStore.any_made and is_owed(param)",
        "more_follows = False",
        "The sum over ranks starts before the output layer's weight gradient is in its bucket.",
    ),
    Fault(
        "store-keeps-one-product-of-two",
        _TP + "weight_grad_store.py",
        "total = grad if total is None else total.add_(grad)",
        "total = grad",
        "A weight that a microbatch applies twice gets the gradient of one application.",
    ),
    Fault(
        "deferral-not-drained",
        _TP + "weight_grad_store.py",
        "    if is_last_stage and config.defer_embedding_wgrad_compute:\n",
        "    if False:\n",
        "The output layer's weight gradients are put off, and nobody comes back to compute them.",
    ),
    Fault(
        "delayed-input-not-gathered",
        _TP + "weight_grad_store.py",
        "if self.sequence_group is not None:",
        "if False:",
        "Under sequence parallelism X is a part of the sequence, and dY is of all of it.",
    ),
    *FAULTS_OF_DEVICES,
    *FAULTS_OF_NAMES,
)
