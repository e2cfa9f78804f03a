"""Short runs in which a result is spoilt: for tests of steps that are run again.

In ranks of `run_ranks`. A run may end by SystemExit, as `pretrain` ends a process; here it is caught.
"""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.rerun_state_machine import get_rerun_state_machine
from minimegatron.core.utils import unwrap_model
from minimegatron.training import training
from minimegatron.training.global_vars import destroy_global_vars
from tests.training.short_runs import MODEL, little_text

FLAGS = "--attention-dropout 0.1 --hidden-dropout 0.1 --rerun-mode validate_results"


@dataclass
class Fault:
    """The loss of one microbatch comes out much too large, on one copy of the model."""

    iteration: int = 2
    microbatch: int = 1
    copy: int = 1
    comes_again: bool = False
    """In each run of the step; otherwise in its first run alone."""
    fatal: bool = True

    def is_now(self, chunk: torch.nn.Module) -> bool:
        machine = get_rerun_state_machine()
        return (
            chunk.training
            and machine.current_iteration == self.iteration
            and chunk.current_microbatch == self.microbatch
            and parallel_state.get_data_parallel_rank() == self.copy
            and (self.comes_again or machine.num_runs == 1)
        )


class Judged:
    """A forward step whose losses are judged, and spoilt where `fault` says so."""

    def __init__(self, fault: Fault | None):
        self.fault = fault

    def __call__(self, data_iterator: Any, model: torch.nn.Module, **plan: bool) -> Any:
        output, loss_func = pretrain_gpt.forward_step(data_iterator, model, **plan)

        def judged(output: torch.Tensor) -> Any:
            loss, *others = loss_func(output)
            if self.fault is not None and self.fault.is_now(unwrap_model(model)):
                loss = loss * 1000.0
            fatal = self.fault is None or self.fault.fatal
            get_rerun_state_machine().validate_result(
                loss, lambda value: value > 1000.0, "planted", fatal=fatal
            )
            return loss, *others

        return output, judged


class Watch:
    """Looks at `train_step` from outside: weights, reported losses, how often the schedule runs."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_schedules = 0
        self.model: list[torch.nn.Module] = []
        self._train_step = training.train_step

    def train_step(self, *args: Any) -> Any:
        *others, schedule = args
        self.model = args[2]

        def counted(**given: Any) -> Any:
            self.num_schedules += 1
            return schedule(**given)

        results = self._train_step(*others, counted)
        self.losses += [float(loss) for loss in results[0].values()]
        return results

    def weights(self) -> list[torch.Tensor]:
        for chunk in self.model:
            chunk.start_param_sync(force_sync=True)
        return [param.detach().clone() for chunk in self.model for param in chunk.parameters()]


def run(
    flags: str, fault: Fault | None = None, device: str | None = None, program: Any = None
) -> dict[str, Any]:
    """One run of `pretrain`: exit code, weights, losses, how often the schedule ran, what was printed.

    `device`: this process says that it is on it. `program`: another one's `main`.
    """
    sys.argv = ["test", *MODEL.split(), *flags.split()]
    watch = Watch()
    code, said = 0, io.StringIO()

    def set_up(*args: Any) -> Any:
        if device is not None:
            get_rerun_state_machine().judge.device_of_rank = lambda: ("node", device)
        return _set_up(*args)

    _set_up = training.setup_model_and_optimizer
    try:
        with (
            little_text(),
            mock.patch.object(training, "train_step", watch.train_step),
            mock.patch.object(training, "setup_model_and_optimizer", set_up),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            if program is not None:
                program()
            else:
                training.pretrain(
                    pretrain_gpt.train_valid_test_datasets_provider,
                    pretrain_gpt.model_provider,
                    pretrain_gpt.ModelType.encoder_or_decoder,
                    Judged(fault),
                    get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
                )
    except SystemExit as ended:
        code = ended.code
    finally:
        weights = watch.weights()
        destroy_global_vars()
        parallel_state.destroy_model_parallel()
    return {
        "code": code,
        "weights": weights,
        "losses": watch.losses,
        "num_schedules": watch.num_schedules,
        "said": said.getvalue(),
    }


def saved_in(folder: Path) -> list[str]:
    """The checkpoints there, by name."""
    return sorted(path.name for path in folder.glob("iter_*"))
