"""Which stage and which rank is slow: the time of each rank's forwards, compared over ranks.

Counterpart: `StragglerDetector` of `megatron.core.utils`, with its names. There CUDA events measure,
and reports have temperature, power and clock rate of each GPU. Here time is that of
`core.timer_reports`: on a GPU each start and each stop waits for the GPU, so that it is the time of the
work and not of its launch. That costs overlap, so the detector is for a few steps, not for a whole run.
"""

from typing import Any

from minimegatron.core.straggler_times import StragglerTimes
from minimegatron.core.timer_reports import Timer


class StragglerDetector(StragglerTimes):
    """Times what runs inside `with stimer:`; there is one in a process. It is off until `configure`.

        stimer = StragglerDetector()

        with stimer(bdata=True):
            batch = get_batch(data_iterator)
        with stimer:
            output_tensor = model(*batch)

    No message between stages is inside, so a stage that waits for its neighbour is not slow. The
    collectives of the model's layers are inside: a rank of a tensor-parallel group that waits for
    another of them looks as slow as that one.

    A second `StragglerDetector()` is the same object in the same state; Megatron's is off again.
    """

    _instance: "StragglerDetector | None" = None

    def __new__(cls) -> "StragglerDetector":
        if cls._instance is None:
            cls._instance = self = super().__new__(cls)
            self._off, self._bdata = True, False
            self._forward, self._data = Timer("forward"), Timer("data")
            self._running: Timer | None = None
            self._coordinates: dict[str, int] = {}
        return cls._instance

    def __call__(self, bdata: bool = False) -> "StragglerDetector":
        """Itself. With `bdata`, the next start is that of getting a batch."""
        self._bdata = bdata
        return self

    def __enter__(self) -> "StragglerDetector":
        if not self._off:
            self.start()
        return self

    def __exit__(self, ex_type: Any, ex_val: Any, ex_tb: Any) -> None:
        if not self._off:
            self.stop()
