"""Each known mistake, made on purpose in a copy of the package: the tests must notice.

A fault's row names what runs against it (a few tests, or one parity case) and a word that must be
in the output, so that it is noticed for what it is. The cases of those probes must also pass on the
code as it is.
"""

import json
import os
import queue
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from minimegatron.exercises.labs.faults import FAULTS, Fault, apply_fault, patched
from minimegatron.exercises.labs.labs import PACKAGE
from tests.asked import asked_for
from tests.mutations_of_backend import CAUGHT_OF_BACKEND
from tests.mutations_of_lines import CAUGHT_OF_LINES
from tests.mutations_of_policy import CAUGHT_OF_POLICY
from tests.mutations_of_replay import GRAPH, RERUN
from tests.mutations_of_straggler import CAUGHT_OF_STRAGGLERS
from tests.mutations_with_context import CAUGHT_WITH_CONTEXT
from tests.mutations_with_experts import CAUGHT_WITH_EXPERTS
from tests.mutations_with_families import CAUGHT_WITH_FAMILIES
from tests.parity import Case
from tests.test_parity import check

ROOT = Path(__file__).parents[1]
ORDER = ("pytest", "tests/core/pipeline_parallel/test_order.py")
STEPS = ("pytest", "tests/core/pipeline_parallel/test_steps.py")
GROUPS = ("pytest", "tests/core/test_rank_generator.py")
SKIPS = ("pytest", "tests/core/optimizer", "-k", "skip")
PLACEMENT = ("pytest", "tests/core/transformer/test_layer_placement.py")
MESSAGES = ("pytest", "tests/core/pipeline_parallel/test_messages.py", "-k")
MESSAGE_LIMITS = ("pytest", "tests/core/pipeline_parallel/test_message_limits.py", "-k")
DDP = ("pytest", "tests/core/distributed/test_distributed_data_parallel.py", "-k")
ZERO = ("tests.probes", '{"pp": 2, "dp": 2, "M": 2, "dist_opt": true}')
MADE_BY_ALL = ("pytest", "tests/core/test_parallel_state.py", "-k", "also_those_of_others")
TP = ("tests.probes", '{"tp": 2, "M": 2}')
SP = ("tests.probes", '{"tp": 2, "M": 2, "sp": true}')
SP_PP = ("tests.probes", '{"tp": 2, "pp": 2, "M": 2, "sp": true}')
PP = ("tests.probes", '{"pp": 2, "M": 3}')
PP_TOKENS = ("tests.probes", '{"pp": 2, "M": 3, "per_token": true}')
VP = ("tests.probes", '{"pp": 2, "vp": 2, "M": 4, "G": 2, "batched": false}')
DP = ("tests.probes", '{"dp": 2, "M": 2}')
DP_TOKENS = ("tests.probes", '{"dp": 2, "M": 2, "per_token": true}')
DP_OVERLAP = ("tests.probes", '{"pp": 2, "dp": 2, "M": 3, "overlap_grad_reduce": true}')
STORE = ("pytest", "tests/core/tensor_parallel/test_weight_grad_store.py", "-k")
OWED = ("pytest", "tests/core/distributed/test_owed_gradients.py", "-k")
PP_DEFER = ("tests.probes", '{"pp": 2, "M": 2, "llama": true, "defer_embedding": true}')

FRAME = ("pytest", "tests/core/pipeline_parallel/test_step_frame.py", "-k")
CHANNELS = ("pytest", "tests/backend/test_channels.py", "-k")
HANDSHAKE = ("pytest", "tests/backend/test_handshake.py", "-k")
FAILED_STEP = ("pytest", "tests/test_failed_step.py", "-k")

LOWERING = ("pytest", "tests/core/pipeline_parallel/test_lowering.py", "-k")
PLACES = ("pytest", "tests/core/pipeline_parallel/test_placement.py", "-k")
TIED = ("pytest", "tests/test_tiny_gpt.py", "-k", "whole_model_once")
GPU_WAYS = ("pytest", "tests/core/test_ways_of_a_gpu.py", "-k")
DEVICES = ("pytest", "tests/training/test_devices.py", "-k")
NAMES = ("pytest", "tests/core/test_left_out.py", "-k")
RANDOM = ("pytest", "tests/core/tensor_parallel/test_random.py", "-k")
STAGES = ("pytest", "tests/core/transformer/test_parts.py", "-k")
CLOCK = ("pytest", "tests/trace/test_device_clock.py", "-k")

CAUGHT_BY = {
    "backward-of-the-newest": (ORDER, r"expected gradient|Deadlock|rank 0 of"),
    "one-warm-up-too-many": (ORDER, r"test_plain_schedules"),
    "warm-up-not-clamped": (ORDER, r"StopIteration|Deadlock|rank \d of"),
    "interleaved-warm-up-once": (ORDER, r"Deadlock|rank \d of|deque|assert"),
    "backward-chunks-in-forward-order": (ORDER, r"Deadlock|deque|StopIteration|empty|expected"),
    "one-receive-too-many": (ORDER, r"IndexError|Deadlock"),
    "short-group-allowed": (
        (*ORDER, "-k", "refuses_short"),
        r"test_interleaving_refuses_short_groups|DID NOT RAISE|Deadlock",
    ),
    "chunks-share-an-iterator": (ORDER, r"expected activation|StopIteration"),
    "input-of-another-chunk": (ORDER, r"expected activation|deque|IndexError"),
    "all-stages-send-first": (ORDER, r"Deadlock"),
    "batched-ring-of-two": ((*ORDER, "-k", "is_refused"), r"DID NOT RAISE"),
    "batch-in-another-order": ((*ORDER, "-k", "plain or lists"), r"rank \d of|test_a_batch_lists"),
    "empty-batch-is-started": ((*ORDER, "-k", "nothing_in_it"), r"starts an empty batch"),
    "odd-stages-swap-half": (ORDER, r"Deadlock|rank \d of"),
    "gradient-to-the-next-stage": (ORDER, r"Deadlock|expected"),
    "freed-while-being-sent": (ORDER, r"memory is freed"),
    "input-without-gradient": (ORDER, r"requires_grad|retain_grad|grad|Deadlock"),
    "full-sequence-buffer": (SP_PP, r"bytes came where|shape"),
    "received-in-another-dtype": (PP, r"dtype|bytes came where"),
    "peer-in-the-world": (
        MESSAGES + ("of_the_world and lone and shared",),
        r"not part of group|rank|peer",
    ),
    "report-changed-in-place": (STEPS, r"shares_storage"),
    "remainder-of-layers-dropped": (PLACEMENT, r"DID NOT RAISE"),
    "only-members-make-groups": (MADE_BY_ALL, r"rank 1 and rank 0 differ"),
    "unused-parameter-not-noticed": (DDP + ("unused",), r"DID NOT RAISE|never launched"),
    "gradients-in-low-precision": (DDP + ("storage",), r"float32"),
    "tied-embedding-among-others": (ZERO, r"is off|differ"),
    "loss-not-divided-by-microbatches": (STEPS, r"three_values"),
    "masked-microbatch-divides-by-zero": (STEPS, r"fully_masked"),
    "context-ranks-forgotten": (STEPS, r"context_ranks"),
    "loss-scale-on-every-stage": (STEPS, r"last_stage_only"),
    "checked-backward-of-a-freed-output": (ORDER, r"[Mm]ismatch in shape"),
    "views-are-freed": (STEPS, r"refuses_views"),
    "input-gradient-not-summed": (TP, r"gradient of .* is off"),
    "bias-on-every-rank": (TP, r"(loss|gradient of .*) is off"),
    "foreign-tokens-not-masked": (TP, r"loss is off"),
    "softmax-of-a-part": (TP, r"loss is off"),
    "sequence-parallel-gradient-not-scattered": (SP, r"gradient of .* is off"),
    "same-draw-on-every-rank": (TP, r"loss is off"),
    "chunks-laid-out-by-rank": (VP, r"loss is off|gradient of .* is off"),
    "embedding-group-of-all-stages": (GROUPS, r"embd|embedding"),
    "gradients-overwritten": (DP, r"gradient of .* is off"),
    "gradients-not-averaged": (DP, r"gradient of .* is off"),
    "no-sync-forgotten": (DP_OVERLAP, r"no_sync|is off"),
    "tied-embedding-not-summed": (PP, r"word_embeddings.weight (is off|differ)"),
    "norm-gradients-not-summed": (SP, r"layernorm.* is off"),
    "norm-gradients-averaged": (SP, r"layernorm.* is off"),
    "tokens-of-one-replica": (DP_TOKENS, r"gradient of .* is off"),
    "tokens-of-every-stage": (PP_TOKENS, r"gradient of .* is off"),
    "bucket-launched-while-a-gradient-is-owed": (
        (*OWED, "schedule_launches"),
        r"another gradient|the bucket of the head waits|AssertionError",
    ),
    "store-keeps-one-product-of-two": ((*STORE, "equal_on_one_rank"), r"twice, .*: column.weight"),
    "deferral-not-drained": (PP_DEFER, r"are still owed"),
    "delayed-input-not-gathered": ((*STORE, "gathered_in_w"), r"mat|shape|size"),
    "clipped-by-the-local-norm": (TP, r"norm is off"),
    "shared-weight-counted-twice": (PP, r"norm is off"),
    "replicas-counted-often": (TP, r"norm is off"),
    "hooks-of-each-chunk": (FRAME + ("loss_scale",), r"chunk 1 linear"),
    "launched-by-backward-and-schedule": (
        FRAME + ("launched_once and written",),
        r"launched twice",
    ),
    "gradients-launched-without-backward": (FRAME + ("planned_forward_only",), r"grad sync"),
    "messages-of-a-failed-step": (
        CHANNELS + ("failed_step_is_dropped",),
        r"must begin every step",
    ),
    "evaluation-of-one-copy-alone": (FAILED_STEP + ("copies[dp]",), r"after layer|raised nothing"),
    "hooks-that-keep-the-wrapper": (DDP + ("nobody_has",), r"assert \[\[False"),
    "failure-kept-secret": (CHANNELS + ("is_told_why",), r"sent nothing within 2 s"),
    "sends-that-never-wait": (MESSAGE_LIMITS + ("channel_is_full and shared",), r"assert \d+ <= 2"),
    "every-message-lent": (MESSAGE_LIMITS + ("no_shared_memory",), r"assert \d+ <= "),
    "anybody-may-call": (HANDSHAKE + ("of_another_user_is_turned",), r"assert|DID NOT WARN"),
    "overflow-seen-by-one-rank": (SKIPS, r"skip"),
    "received-as-early-as-possible": (
        LOWERING + ("3-v-lone",),
        r"expected|Deadlock|differ|crossed",
    ),
    "handed-over-with-its-graph": (LOWERING + ("2-v-batched",), r"second time|assert"),
    "handed-over-to-the-next-rank": (PLACES + ("of_a_v",), r"assert"),
    "data-in-the-order-of-the-loader": (LOWERING + ("2-v-tagged",), r"expected activation"),
    "reports-in-the-order-of-work": (LOWERING + ("2-v-tagged",), r"assert \["),
    "asked-for-sizes-too-early": (LOWERING + ("sizes_that_vary",), r"Deadlock"),
    "tied-copies-of-one-rank-not-summed": (TIED, r"assert"),
    "gradients-noted-and-not-looked-at": ((*GPU_WAYS, "with_the_norm"), r"DID NOT RAISE"),
    "count-of-steps-on-the-cpu": ((*GPU_WAYS, "itself_would_put"), r"'cpu'.*'meta'"),
    "sizes-of-the-first-batch": ((*GPU_WAYS, "another_size"), r"DID NOT RAISE|split"),
    "all-ranks-on-the-laptops-gpu": ((*DEVICES, "what_is_chosen"), r"'cuda'"),
    "waits-for-a-gpu-that-waits": ((*CLOCK, "waits_for_ever"), r"waits for what never ends"),
    "any-value-is-taken": ((*NAMES, "values"), r"DID NOT RAISE"),
    "zero-is-false": ((*NAMES, "values"), r"DID NOT RAISE"),
    "positions-of-our-own": ((*NAMES, "values"), r"unit is|TypeError|assert"),
    "inner-fork-repeats": ((*RANDOM, "goes_on_with_its_stream"), r"assert|equal"),
    "stage-that-thinks-it-is-alone": ((*STAGES, "config_that_says_one"), r"DID NOT RAISE"),
    **CAUGHT_WITH_EXPERTS,
    **CAUGHT_WITH_CONTEXT,
    **CAUGHT_WITH_FAMILIES,
    **CAUGHT_OF_POLICY,
    **GRAPH,
    **RERUN,
    **CAUGHT_OF_STRAGGLERS,
    **CAUGHT_OF_LINES,
    **CAUGHT_OF_BACKEND,
}


class Patch(NamedTuple):
    """What a probe runs on: a package in a folder, or this one with another text of a file."""

    folder: str = ""
    file: str = ""
    text: str = ""


class Runner:
    """A process that runs probes, one at a time, in forks of itself; see `mutation_runner`."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests/mutation_runner.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Plugins that no probe needs take half a second to load.
            env={
                **os.environ,
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            text=True,
        )

    def run(self, probe: tuple[str, ...], folder: Path, patch: Patch) -> tuple[int, str]:
        """The probe: exit code, and what it printed.

        On what the patch says; the output is kept in `folder`.
        """
        pytest_options = ["-x", "-q", "-p", "no:cacheprovider"] if probe[0] == "pytest" else []
        job = {
            **patch._asdict(),
            "module": probe[0],
            "arguments": [*probe[1:], *pytest_options],
            "output": os.fspath(folder / "output.txt"),
            "timeout": 280,  # under load, 120 s were once not enough for all orders
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return int(answer), (folder / "output.txt").read_text(errors="replace")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def runners():
    """Two of them, handed out to whoever has something to run."""
    idle: queue.Queue[Runner] = queue.Queue()
    made = [Runner(), Runner()]
    for runner in made:
        idle.put(runner)
    yield idle
    for runner in made:
        runner.close()


def run_probe(
    probe: tuple[str, ...], folder: Path, runners: queue.Queue, patch: Patch
) -> tuple[int, str]:
    runner = runners.get()
    try:
        return runner.run(probe, folder, patch)
    finally:
        runners.put(runner)


def copy_with_tests(folder: Path, patched: str) -> None:
    """The package, whose file `patched` may be changed: all others are the very files, not copies."""
    being_written = shutil.ignore_patterns("*.pyc.*")
    package = folder / "minimegatron"
    shutil.copytree(PACKAGE, package, ignore=being_written, copy_function=link)
    text = (package / patched).read_text()
    (package / patched).unlink()
    (package / patched).write_text(text)
    (folder / "tests").symlink_to(ROOT / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)


def link(source: str, target: str) -> None:
    """A second name for a file; a copy on another disk. A hundred copies of the package take long."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


IMPORTED_ANEW = (
    "handed-over-to-the-next-rank",
    "experts-in-dense-buffer",
    "mean-of-microbatches",
)
"""Faults in what a module does while it is imported; their probes import a copy of the package."""


def run_broken(fault: Fault, folder: Path, runners: queue.Queue) -> tuple[int, str]:
    probe, _ = CAUGHT_BY[fault.name]
    if fault.name in IMPORTED_ANEW:
        copy_with_tests(folder, fault.file)
        apply_fault(fault, folder / "minimegatron")
        patch = Patch(folder=os.fspath(folder))
    else:
        patch = Patch(file=fault.file, text=patched((PACKAGE / fault.file).read_text(), fault))
    done = run_probe(probe, folder, runners, patch)
    shutil.rmtree(folder)
    return done


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory, runners):
    """The faults of this run, two at a time; one process each, and the ranks that a probe starts."""
    faults = asked_for(request, "test_the_fault_is_noticed", "fault")
    with ThreadPoolExecutor(2) as pool:
        running: dict[str, Future] = {
            fault.name: pool.submit(run_broken, fault, tmp_path_factory.mktemp(fault.name), runners)
            for fault in faults
        }
        yield running


def test_every_fault_has_a_probe_and_the_numbers_are_as_promised():
    assert {fault.name for fault in FAULTS} == set(CAUGHT_BY)
    assert len(FAULTS) >= 35
    assert len({fault.story for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_noticed(fault, outcomes):
    code, output = outcomes[fault.name].result()
    assert code == 1, f"the tests pass with this mistake:\n{output[-3000:]}"
    assert re.search(CAUGHT_BY[fault.name][1], output), output[-3000:]


# The probes that are tests of the suite pass as part of it.
PARITY_PROBES = sorted({probe[:2] for probe, _ in CAUGHT_BY.values() if probe[0] != "pytest"})
PARITY_CASES = [Case(**json.loads(words)) for _, words in PARITY_PROBES]


@pytest.mark.parametrize("world", sorted({case.world for case in PARITY_CASES}))
def test_the_cases_of_the_probes_equal_one_process(world, tmp_path_factory):
    check(PARITY_CASES, world, tmp_path_factory.getbasetemp())


def test_a_probe_passes_without_a_fault(tmp_path, runners):
    copy_with_tests(tmp_path, "core/utils.py")
    for patch in (Patch(), Patch(folder=os.fspath(tmp_path))):
        code, output = run_probe(DP, tmp_path, runners, patch)
        assert code == 0, output


def test_a_patch_that_no_longer_fits_is_told(tmp_path):
    copy_with_tests(tmp_path, "core/utils.py")
    fault = Fault("gone", "core/utils.py", "no such line", "", "")
    with pytest.raises(ValueError, match="occurs 0 times"):
        apply_fault(fault, tmp_path / "minimegatron")
