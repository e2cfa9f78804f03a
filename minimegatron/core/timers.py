"""Wall-clock timers by name: how long each link of the chain took, on the slowest and fastest rank.

Counterpart: `megatron.core.timers`, with the same surface; there the schedules call it themselves.
"""

from minimegatron.core.timer_reports import Timer, TimerReports


class DummyTimer(Timer):
    """What `Timers` hands out for a name above its log level: takes every call, measures nothing."""

    def start(self, barrier: bool = False) -> None:
        """Does nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Does nothing."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Raises RuntimeError: there is nothing to report."""
        raise RuntimeError(f"timer {self.name!r} is above the log level; it measured nothing")


class Timers(TimerReports):
    """Timers by name, made on first use. Also an observer of `@traced` calls (`core.tracing`).

    `log_level` 0 measures only what is cheap and always wanted, 1 adds the big parts of a step, 2
    every traced call. `log_option` says what `log` prints: "max" (slowest rank), "minmax" or "all".
    Raises ValueError for another level or option.
    """

    def __init__(self, log_level: int, log_option: str = "minmax"):
        if log_level not in (0, 1, 2):
            raise ValueError(f"log_level is {log_level}; use 0, 1 or 2")
        if log_option not in ("max", "minmax", "all"):
            raise ValueError(f'log_option is {log_option!r}; use "max", "minmax" or "all"')
        super().__init__(log_level, log_option)

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name; one that measures nothing if its level is above ours.

        The level is fixed on first use (2 if not given). Raises ValueError if it changes later.
        """
        known = self._log_levels.setdefault(name, 2 if log_level is None else log_level)
        if log_level is not None and log_level != known:
            raise ValueError(f"timer {name!r} has log_level {known}, not {log_level}")
        if name not in self._timers:
            self._timers[name] = Timer(name) if known <= self._log_level else DummyTimer(name)
        return self._timers[name]
