"""Which stage and which rank is slow: the time of each rank's forwards, compared over ranks.

Counterpart: `StragglerDetector` of `megatron.core.utils`, with its names. There CUDA events measure,
and reports have temperature, power and clock rate of each GPU. Here time is that of
`core.timer_reports`: on a GPU each start and each stop waits for the GPU, so that it is the time of the
work and not of its launch. That costs overlap, so the detector is for a few steps, not for a whole run.
"""

from collections.abc import Mapping
from typing import Any

import torch

from minimegatron.core import straggler_words
from minimegatron.core.timer_reports import Timer, gather_rows


class StragglerDetector:
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

    # -- On and off --

    def configure(
        self,
        world: int,
        rank: int,
        mmcnt: int = 1,
        amp: float = 3.0,
        port: int = 65535,
        prefill: int = 1024,
        enabled: bool = False,
        *,
        coordinates: Mapping[str, int] | None = None,
    ) -> None:
        """Turns it on or off, on every rank alike, between two steps. What it has measured is dropped.

        Args:
            world: how many ranks there are.
            rank: this one; rank 0 prints.
            mmcnt: how many ranks a report names at either end.
            amp: work of a step over that of its forwards, for the throughput that `report` estimates.
            port: not used. Megatron opens it on rank 0, for anybody who can reach the machine, to turn
                the detector on and off. Nothing is opened here; call `configure` again.
            prefill: not used; there are no events to make in advance.
            coordinates: this rank's place on each axis, such as `{"stage": 1, "tp": 0}`, with the same
                axes on every rank. Reports name ranks by it, and have a line for each "stage". None
                for those of the call before. Megatron knows only numbers of ranks.

        It works on a CPU too, and each time it is called. Megatron's needs CUDA, and takes the first
        call only.
        """
        self.world, self.rank, self.mmcnt, self.amp = world, rank, max(mmcnt, 1), amp
        if coordinates is not None:
            self._coordinates = dict(coordinates)
        self.reset()
        self._off = not enabled

    @property
    def enabled(self) -> bool:
        """Whether it measures."""
        return not self._off

    # -- Measuring --

    def start(self) -> None:
        """A forward begins, or getting a batch. Does nothing while off.

        Raises RuntimeError if one has begun and not ended: a forward has no forward inside.
        """
        if self._off:
            return
        timer = self._data if self._bdata else self._forward
        self._bdata = False
        timer.start()
        self._running = timer

    def stop(self) -> None:
        """It ends, also by an exception; does nothing if none has begun."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def reset(self) -> None:
        """Forgets what it has measured, and what has begun."""
        self._forward.reset()
        self._data.reset()
        self._running, self._bdata = None, False

    # -- Reports --

    def elapsed(self) -> tuple[float, float]:
        """Milliseconds of forwards and of getting batches since the last reset, which this is too.

        Megatron's second number is that of the slowest batch; temperature, power, utilization and
        clock rate of the GPU follow.
        """
        times = self._forward.elapsed(reset=False), self._data.elapsed(reset=False)
        self.reset()
        return 1000.0 * times[0], 1000.0 * times[1]

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Prints, on rank 0, how long a step's forwards took on each stage and on which ranks.

        Every rank calls it, for one gather. Times are milliseconds a step; what was measured is
        dropped. It does nothing while off, or for 0 steps.

        Args:
            total_flops: floating-point operations of all ranks since the last report. With them a
                rank's throughput is estimated, as in Megatron: as if each rank did an equal part, and
                a step took `amp` times its forwards. Nothing in this package counts them, so a run's
                own reports have times alone.
            log_interval: steps since then.

        Returns True on the rank that printed.
        """
        if self._off or log_interval <= 0:
            return False
        times = [milliseconds / log_interval for milliseconds in self.elapsed()]
        row = torch.tensor([*times, *self._coordinates.values()], dtype=torch.float64)
        table = gather_rows(row).tolist()
        if self.rank == 0:
            work = total_flops / log_interval / (self.amp * self.world)
            print(
                straggler_words.straggler_words(table, list(self._coordinates), self.mmcnt, work),
                flush=True,
            )
        return self.rank == 0
