"""Parts 1 to 6: what one GPU shows.

Called by: `parts`. Calls: `parity` and the benchmarks for what is compared and timed.
"""

import dataclasses
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from minimegatron import trace
from minimegatron.core import collectives, parallel_state, tensor_parallel
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.pipeline_parallel import local_transport, transport
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import get_device
from minimegatron.training.devices import name_of_gpu
from tests import parity
from tests.benchmarks import gpu_mfu
from tests.benchmarks.megatron_like import OURS, Shape, Training, load
from tests.fake_transport import FakeGroup
from tests.gpu.host_syncs import beyond_what_is_allowed, count_waits
from tests.gpu.place import (
    Finding,
    Place,
    at_least,
    at_most,
    difference,
    is_equal,
    no_problems,
)
from tests.training import short_runs

LOSS_BOUND, GRADIENT_BOUND, BF16_BOUND = 1e-5, 1e-4, 0.02
TRACING_BOUND = 1.03
MFU_BOUND, PRODUCT_BOUND = 0.15, 0.5
WITHOUT_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
SMALLEST = Shape(2, 64, 2, 32, 2, 2, 512, bf16=True)
GROUPS = ("tp", "pp", "cp", "dp", "dp_cp", "mp", "embd", "pos_embd", "tp_cp", "tp_dp_cp")


# -- 1 --


def inventory(place: Place) -> list[Finding]:
    """What is here. A mode in which a GPU serves one process only is refused: part 6 shares one."""
    found = [Finding("torch", torch.__version__), Finding("CUDA", str(torch.version.cuda))]
    if not place.is_gpu:
        return [*found, is_equal("GPUs", place.num_gpus, 0)]
    gpus = range(place.num_gpus)
    names = [name_of_gpu(gpu) for gpu in gpus]
    modes = subprocess.run(
        [shutil.which("nvidia-smi") or "nvidia-smi", "--query-gpu=compute_mode", "--format=csv"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")[1 : 1 + place.num_gpus]
    peers = [torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b]
    return [
        *found,
        Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version()))),
        Finding("GPUs", ", ".join(torch.cuda.get_device_name(gpu) for gpu in gpus)),
        is_equal("GPUs that torch can use, by their names", len(set(names) - {""}), place.num_gpus),
        is_equal("compute modes", {mode.strip() for mode in modes}, {"Default"}),
        Finding("pairs that reach each other's memory", f"{sum(peers)} of {len(peers)}"),
    ]


# -- 2 and 3 --


def first_step(dtype: str, recompute: str | None = None) -> tuple[list[float], dict]:
    """In a rank: losses and raw gradients of one step of one process, on this rank's device."""
    case = parity.Case(dtype=dtype, recompute=recompute)
    groups = ProcessGroupCollection(**{name: FakeGroup() for name in GROUPS})
    chunks, optimizer = parity.build(case, groups)
    data = parity.batches(case.M)
    losses, gradients, _ = next(parity.train_steps(case, chunks, optimizer, groups, data, 1))
    return losses, {name: grad.cpu() for name, _, grad in gradients}


def on_meta() -> set[str]:
    """In a rank: where the tensors of a forward and a backward are that compute nothing."""
    model = small_model(None).to("meta")
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    model(tokens, tokens, None, labels=tokens).sum().backward()
    return {str(param.grad.device) for param in model.parameters()}


def against_the_cpu(place: Place) -> list[Finding]:
    """One step in float32 beside the same in float64 on the CPU. TF32 is off unless asked for."""
    (here,) = place.launch(first_step, 1, "float32")
    (wanted,) = Place("cpu").launch(first_step, 1, "float64")
    losses = difference(torch.tensor(here[0]), torch.tensor(wanted[0]))
    worst = max(difference(grad, wanted[1][name]) for name, grad in here[1].items())
    return [
        is_equal("matrix products", torch.get_float32_matmul_precision(), "highest"),
        at_most("losses, largest difference", losses, LOSS_BOUND),
        at_most(f"{len(wanted[1])} gradients, largest difference", worst, GRADIENT_BOUND),
        is_equal("devices in a step on meta", place.launch(on_meta, 1)[0], {"meta"}),
    ]


def small_model(recompute: str | None, dropout: float = 0.2) -> GPTModel:
    """With dropout, whose random numbers start at the same place each time."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = dataclasses.replace(
        parity.transformer_config(parity.Case(num_layers=2, dtype="float32", recompute=recompute)),
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    groups = ProcessGroupCollection(**{name: FakeGroup() for name in GROUPS})
    return GPTModel(
        config, get_gpt_layer_local_spec(), parity.VOCAB, parity.SEQ, pg_collection=groups
    )


def gradients_with_dropout(recompute: str | None) -> list[torch.Tensor]:
    """In a rank: of one forward and backward."""
    model = small_model(recompute).to(get_device())
    tokens = torch.arange(16, device=get_device()).view(2, 8)
    model(tokens, tokens % 8, None, labels=tokens).sum().backward()
    return [param.grad.cpu() for param in model.parameters()]


def recompute_changes_nothing() -> list[str]:
    """In a rank: with full and with selective recompute, dropout drops the same."""
    wanted = gradients_with_dropout(None)
    return [
        f"{recompute} recompute: gradient {number}"
        for recompute in ("full", "selective")
        for number, grad in enumerate(gradients_with_dropout(recompute))
        if not torch.equal(grad, wanted[number])
    ]


def train_and_save(folder: str, flags: str) -> list[float]:
    """In a rank: two steps, saved."""
    return short_runs.run(f"--save {folder} {flags}", 2)["losses"]


def save_again(folder: str, target: str, flags: str) -> list[float]:
    """In a rank: no step; what was read from `folder` is saved in `target`."""
    return short_runs.run(f"--load {folder} --save {target} {flags}", 2)["losses"]


def go_on(folder: str, flags: str) -> list[float]:
    """In a rank: two steps more."""
    return short_runs.run(f"--load {folder} {flags}", 4)["losses"]


def train_on(flags: str) -> list[float]:
    """In a rank: all four at once."""
    return short_runs.run(flags, 4)["losses"]


def saved_elsewhere(place: Place, folder: Path) -> list[Finding]:
    """A checkpoint, with its random numbers, goes on where it was made; the CPU can read and write it.

    Random numbers of one device mean nothing to another: what passes through the CPU drops nothing.
    """
    here, on_cpu, still = folder / "here", folder / "on_cpu", "--no-load-rng " + WITHOUT_DROPOUT
    (all_at_once,) = place.launch(train_on, 1, "")
    (first,) = place.launch(train_and_save, 1, str(here), "")
    (second,) = place.launch(go_on, 1, str(here), "")
    (none,) = Place("cpu").launch(save_again, 1, str(here), str(on_cpu), still)
    straight, around = (place.launch(go_on, 1, str(path), still)[0] for path in (here, on_cpu))
    return [
        is_equal("losses, with dropout, saved in between", [*first, *second], all_at_once),
        is_equal("steps that the CPU makes in between", len(none), 0),
        is_equal("losses after a way through the CPU", around, straight),
    ]


def in_bf16(place: Place) -> list[Finding]:
    """A step in bf16; recompute; a checkpoint between two runs."""
    (here,) = place.launch(train_on, 1, f"--bf16 {WITHOUT_DROPOUT}")
    (wanted,) = Place("cpu").launch(train_on, 1, WITHOUT_DROPOUT)
    off = difference(torch.tensor(here), torch.tensor(wanted))
    (problems,) = place.launch(recompute_changes_nothing, 1)
    with tempfile.TemporaryDirectory() as folder:
        saved = saved_elsewhere(place, Path(folder))
    return [
        at_most("losses in bf16, largest difference", off, BF16_BOUND),
        no_problems("gradients with dropout, recomputed", 2, problems),
        *saved,
    ]


# -- 4 --


ONE_RANK = (
    "",
    "--bf16",
    "--fp16 --initial-loss-scale 1",
    "--calculate-per-token-loss --bf16",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16",
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def host_syncs(place: Place) -> list[Finding]:
    """The program waits for its GPU in a step nowhere but where `host_syncs.ALLOWED` says."""
    on_meta = not place.is_gpu
    runs = [(flags, on_meta) for flags in ONE_RANK] + [(RECOMPUTED, False)]
    found = []
    for flags, is_on_meta in runs[: 2 if place.is_quick else None]:
        (counts,) = place.launch(count_waits, 1, flags, is_on_meta)
        problems = beyond_what_is_allowed(counts)
        what = f"waits in a step {flags}".rstrip()
        found.append(no_problems(what, len(counts), problems))
    return found


# -- 5 --


def flash_is_used() -> str:
    """In a rank: whether torch's flash kernel takes what a bf16 model's attention gives it."""
    model = small_model(None, dropout=0.0).to(get_device(), torch.bfloat16)
    tokens = torch.arange(16, device=get_device()).view(2, 8)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            model(tokens, tokens % 8, None, labels=tokens)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "flash"


def measure_speed(device: str, is_quick: bool) -> dict[str, Any]:
    """In a rank: the peak, and each implementation's share of it."""
    shape = SMALLEST if is_quick else gpu_mfu.SMALL
    peak = gpu_mfu.measured_peak(device, 64 if is_quick else 8192, 2 if is_quick else 10)
    times, missing = gpu_mfu.measure(shape, device, 1 if is_quick else 10)
    sheet = gpu_mfu.peak_of(torch.cuda.get_device_name() if device == "cuda" else "")
    return {
        "peak": peak,
        "sheet": sheet,
        "rows": gpu_mfu.rows_of(shape, times, (sheet, peak)),
        "missing": missing,
        "tracing": tracing_ratio(shape, device),
    }


def tracing_ratio(shape: Shape, device: str, num_pairs: int = 10) -> float:
    """A traced step over one that is not, the median of pairs."""
    step, ratios = Training(load(OURS), shape, device).step, []

    def seconds() -> float:
        begun = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    for _ in range(3 if device == "cpu" else num_pairs):
        plain = seconds()
        with trace():
            ratios.append(seconds() / plain)
    return statistics.median(ratios)


def product(found: dict[str, Any], is_judged: bool) -> Finding:
    """What a large product reaches of the data sheet's peak. Far below, something else is wrong."""
    what = "bf16 product, FLOP/s"
    if found["sheet"] is None or not is_judged:
        return Finding(what, f"{found['peak']:.3g}", "no data sheet is known here")
    return at_least(what, found["peak"], PRODUCT_BOUND * found["sheet"])


def speed(place: Place) -> list[Finding]:
    """The peak of a large product, utilisation beside others, and what tracing costs."""
    # Over gloo: the turns of what is compared begin together by a clock on the CPU.
    (found,) = place.launch(measure_speed, 1, place.device, place.is_quick, shared=True)
    judged = place.is_gpu and not place.is_quick
    findings = [
        product(found, judged),
        at_most("traced step / plain step", found["tracing"], TRACING_BOUND if judged else 100.0),
        *(Finding(f"left out: {name}", reason) for name, reason in found["missing"].items()),
    ]
    for row in found["rows"]:
        is_ours = row["implementation"] == "ours"
        name = f"utilisation, of the measured peak: {row['implementation']}"
        findings.append(at_least(name, row["mfu_measured"], MFU_BOUND, is_ours and judged))
    findings.append(is_equal("attention in bf16", place.launch(flash_is_used, 1)[0], "flash"))
    return findings


# -- 6 --


def layouts(
    place: Place, cases: list[parity.Case], shared: bool = False, run: Any = parity.run_cases
) -> Finding:
    """Every case on real ranks against one process: losses, raw gradients, weights."""
    compared, problems = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            work = [(case, parity.reference(case.serial(), Path(folder)))]
            for rank in place.launch(run, case.world, work, shared=shared):
                for _, number, _, found in rank:
                    compared += number
                    problems += found
    return no_problems("losses, gradients, weights", compared, problems)


def staged_cases(work: list) -> list:
    """In a rank without a GPU: what is exchanged goes through copies, as it does on a shared GPU."""
    with (
        mock.patch.object(collectives, "needs_staging", lambda *_: True),
        mock.patch.object(transport, "needs_staging", lambda *_: True),
        mock.patch.object(local_transport, "connect", lambda *_, **__: None),
    ):
        return parity.run_cases(work)


def sharing(place: Place) -> list[Finding]:
    """Four ranks on one GPU, over gloo: what they send goes through the memory of the CPU."""
    zero1 = parity.Case(dp=2, dist_opt=True, overlap_grad_reduce=True, overlap_param_gather=True)
    cases = [parity.Case(tp=2, pp=2), parity.Case(pp=4), zero1]
    if place.is_quick:
        cases = [parity.Case(pp=2), zero1]
    run = parity.run_cases if place.is_gpu else staged_cases
    return [layouts(place, cases, shared=True, run=run)]
