"""Parts on one GPU: the same numbers as the CPU, NCCL alone, ranks that share it, waits.

Called by: `run_part`. Calls: `parity` and short training runs for what is compared.
"""

import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from minimegatron.backend import SharedMemoryGroup
from minimegatron.core import all_to_all, collectives, parallel_state, tensor_parallel
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import get_device, set_device
from minimegatron.training.devices import name_of_gpu
from tests import parity
from tests.fake_transport import FakeGroup
from tests.gpu import shared_backend
from tests.gpu.host_syncs import beyond_what_is_allowed, count_waits
from tests.gpu.place import Finding, Place, at_most, each, is_equal, no_problems
from tests.gpu.tensors import difference
from tests.training import short_runs
from tests.ways_of_a_gpu import staged

LOSS_BOUND, GRADIENT_BOUND, BF16_BOUND = 1e-5, 1e-4, 0.02
WITHOUT_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
GROUPS = ("tp", "pp", "cp", "dp", "dp_cp", "mp", "embd", "pos_embd", "tp_cp", "tp_dp_cp")


# -- step, bf16 --


def first_step(dtype: str) -> tuple[list[float], dict, str]:
    """In a rank: losses and raw gradients of one step of one process, on this rank's device; and how
    torch multiplies matrices of float32 there."""
    case = parity.Case(dtype=dtype)
    groups = ProcessGroupCollection(**{name: FakeGroup() for name in GROUPS})
    chunks, optimizer = parity.build(case, groups)
    data = parity.batches(case.M)
    losses, gradients, _ = next(parity.train_steps(case, chunks, optimizer, groups, data, 1))
    raw = {name: grad.cpu() for name, _, grad in gradients}
    return losses, raw, torch.get_float32_matmul_precision()


def on_meta() -> set[str]:
    """In a rank: where the tensors of a forward and a backward are that compute nothing."""
    model = small_model(None).to("meta")
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    model(tokens, tokens, None, labels=tokens).sum().backward()
    return {str(param.grad.device) for param in model.parameters()}


def against_the_cpu(place: Place) -> Iterator[Finding]:
    """One step in float32 beside the same in float64 on the CPU. TF32 is off unless asked for."""
    (here,) = place.launch(first_step, 1, "float32")
    (wanted,) = place.on_the_cpu().launch(first_step, 1, "float64")
    yield is_equal("matrix products", here[2], "highest")
    losses = difference(torch.tensor(here[0]), torch.tensor(wanted[0]))
    yield at_most("losses, largest difference", losses, LOSS_BOUND)
    worst = max(difference(grad, wanted[1][name]) for name, grad in here[1].items())
    yield at_most(f"{len(wanted[1])} gradients, largest difference", worst, GRADIENT_BOUND)
    yield is_equal("devices in a step on meta", place.launch(on_meta, 1)[0], {"meta"})


def small_model(recompute: str | None, dropout: float = 0.2) -> GPTModel:
    """With dropout, whose random numbers start at the same place each time."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = replace(
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


def wrong_random_numbers() -> list[str]:
    """In a rank: the states of both generators, there and back through the CPU's memory."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    tracker = tensor_parallel.get_cuda_rng_tracker()

    def draw() -> list[torch.Tensor]:
        plain = torch.rand(1000, device=get_device())
        with tracker.fork():
            return [plain, torch.rand(1000, device=get_device())]

    draw()
    kept = {name: state.cpu().clone() for name, state in tracker.get_states().items()}
    default = tensor_parallel.random.get_rng_state().cpu().clone()
    wanted = draw()
    draw()
    tracker.set_states(kept)
    with tensor_parallel.recompute.repeats_from(default):
        found = draw()
    names = ("default generator", "model-parallel generator")
    pairs = zip(names, found, wanted, strict=True)
    return [name for name, here, there in pairs if not torch.equal(here, there)]


def saved_elsewhere(place: Place) -> Iterator[Finding]:
    """A checkpoint, with its random numbers, goes on where it was made; the CPU can read and write it.

    Random numbers of one device mean nothing to another: what passes through the CPU drops nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        here, on_cpu = Path(folder) / "here", Path(folder) / "on_cpu"
        still = "--no-load-rng " + WITHOUT_DROPOUT
        (all_at_once,) = place.launch(train_on, 1, "")
        (first,) = place.launch(train_and_save, 1, str(here), "")
        (second,) = place.launch(go_on, 1, str(here), "")
        yield is_equal("losses, with dropout, saved in between", [*first, *second], all_at_once)
        (none,) = place.on_the_cpu().launch(save_again, 1, str(here), str(on_cpu), still)
        yield is_equal("steps that the CPU makes in between", len(none), 0)
        straight, around = (place.launch(go_on, 1, str(path), still)[0] for path in (here, on_cpu))
        yield is_equal("losses after a way through the CPU", around, straight)


def beside_float32(place: Place) -> Iterator[Finding]:
    """Steps in bf16 beside the same in float32 on the CPU."""
    (here,) = place.launch(train_on, 1, f"--bf16 {WITHOUT_DROPOUT}")
    (wanted,) = place.on_the_cpu().launch(train_on, 1, WITHOUT_DROPOUT)
    off = difference(torch.tensor(here), torch.tensor(wanted))
    yield at_most("losses in bf16, largest difference", off, BF16_BOUND)


def repeated(place: Place) -> Iterator[Finding]:
    """What is drawn twice from one state is the same."""
    (problems,) = place.launch(recompute_changes_nothing, 1)
    yield no_problems("gradients with dropout, recomputed", 2, problems)
    (problems,) = place.launch(wrong_random_numbers, 1)
    yield no_problems("random numbers from a kept state", 2, problems)


def attention(place: Place) -> Iterator[Finding]:
    """Which kernel computes it."""
    yield is_equal("attention in bf16", place.launch(flash_is_used, 1)[0], "flash")


def in_bf16(place: Place) -> Iterator[Finding]:
    """Steps in bf16; the kernel of attention; recompute; random numbers; a checkpoint in between."""
    sections = (beside_float32, attention, repeated, saved_elsewhere)
    yield from each(*(partial(section, place) for section in sections))


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


# -- nccl --


def wrong_collectives() -> list[str]:
    """In a rank: each collective of numbers whose answer is known."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    mine = torch.full((3,), rank + 1.0, device=get_device())
    total, wrong = size * (size + 1) / 2, []

    def check(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(found.cpu(), wanted):
            wrong.append(f"{what} on rank {rank}: {found.tolist()}")

    summed, mean = mine.clone(), mine.clone()
    collectives.all_reduce(summed, group)
    check("all-reduce", summed, torch.full((3,), total))
    collectives.all_reduce(mean, group, dist.ReduceOp.AVG)
    check("average", mean, torch.full((3,), total / size))
    gathered = torch.empty(3 * size, device=mine.device)
    collectives.all_gather(gathered, mine, group)
    check("all-gather", gathered, torch.arange(1.0, size + 1).repeat_interleave(3))
    piece = torch.empty(3, device=mine.device)
    collectives.reduce_scatter(piece, gathered, group)
    check("reduce-scatter", piece, torch.full((3,), (rank + 1.0) * size))
    first = mine.clone()
    collectives.broadcast(first, 0, group)
    check("broadcast", first, torch.ones(3))
    rows = torch.full((size,), rank + 1.0, device=mine.device)
    collectives.all_to_all(given := torch.empty_like(rows), rows, group)
    check("all-to-all", given, torch.arange(1.0, size + 1))
    return wrong


COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "pass_to_next",
)
ZERO1_BF16 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16"
PROGRAM = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 "
    "--seq-length 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 "
    "--log-interval 1 --eval-iters 0 --bf16 --use-distributed-optimizer"
)


def never_alone() -> Counter[str]:
    """In a rank: from now on, a group of one asks its backend too. What reaches `torch.distributed`.

    The package skips what one rank need not exchange. So the lines that say so are taken out.
    """
    namespace: dict[str, Any] = {}
    for module in (collectives, all_to_all):
        source = inspect.getsource(module)
        changed = source.replace("group.size() == 1", "False").replace("group.size() > 1", "True")
        changed = changed.replace("if size == 1", "if False")
        of_module = {"__name__": module.__name__}
        exec(compile(changed, module.__file__, "exec"), of_module)
        namespace |= of_module
    for name in COLLECTIVES:
        function = inspect.unwrap(getattr(collectives, name))
        function.__code__ = inspect.unwrap(namespace[name]).__code__
    reached: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            reached[name] += 1
            return function(*args, **kwargs)

        return call

    for holder, name in (
        (dist, "all_reduce"),
        (dist, "broadcast"),
        (dist, "all_to_all_single"),
        (collectives, "_all_gather"),
        (collectives, "_reduce_scatter"),
        (SharedMemoryGroup, "all_gather_of_no_step"),  # of a group that knows steps
    ):
        kind = name.lstrip("_").removesuffix("_of_no_step")
        setattr(holder, name, counting(kind, getattr(holder, name)))
    return reached


def collectives_alone() -> tuple[list[str], int]:
    """In a rank: what is wrong of all collectives, and how many kinds went through the backend."""
    reached = never_alone()
    return wrong_collectives(), len(reached)


def train_alone(flags: str) -> tuple[list[float], dict[str, int]]:
    """In a rank: four steps whose collectives all go through the backend."""
    reached = never_alone()
    return train_on(flags), dict(reached)


def every_collective(place: Place) -> Iterator[Finding]:
    """Each of them reaches NCCL, and its answer is right."""
    ((problems, num_kinds),) = place.launch(collectives_alone, 1)
    yield no_problems("collectives of one rank", 6, problems)
    yield is_equal("kinds of them that torch.distributed saw", num_kinds, 5)


def zero1_alone(place: Place) -> Iterator[Finding]:
    """Training whose reductions and gathers go through NCCL, overlapped."""
    (plain,) = place.launch(train_on, 1, f"--bf16 {WITHOUT_DROPOUT}")
    ((zero1, reached),) = place.launch(train_alone, 1, f"{ZERO1_BF16} {WITHOUT_DROPOUT}")
    yield is_equal("losses with ZeRO-1 and both overlaps", zero1, plain)
    both = reached.get("all_gather", 0) > 0 and reached.get("reduce_scatter", 0) > 0
    yield is_equal("its reductions and gathers went through torch.distributed", both, True)


def program_alone(place: Place) -> Iterator[Finding]:
    """The program as one starts it."""
    # Without a network, a machine may not know its own name.
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += ["-m", "minimegatron.pretrain_gpt", *PROGRAM.split(), "--device", place.device]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
        )
        code, output = str(done.returncode), done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = "none after 60 s", (late.stdout or b"").decode(errors="replace")
    print(output)
    yield is_equal("exit code of torchrun -m minimegatron.pretrain_gpt", code, "0")
    yield is_equal("its backend", backends_in(output), ["nccl" if place.is_gpu else "shm"])
    warned = [line for line in output.splitlines() if "Warning" in line or "[W" in line]
    yield Finding("lines of warnings", f"{len(warned)}", "shown, not judged")
    for line in warned[:5]:
        yield Finding("warning", line.strip())


def world_of_one(place: Place) -> Iterator[Finding]:
    """Every collective of one rank over NCCL, a training run, and the program as one starts it."""
    sections = (every_collective, zero1_alone, program_alone)
    yield from each(*(partial(section, place) for section in sections))


def backends_in(output: str) -> list[str]:
    """What the program's first line says.

    >>> backends_in("> 1 ranks: tp=1 pp=1, nccl\\n")
    ['nccl']
    """
    return re.findall(r"^> \d+ ranks?: .*, (\w+)$", output, re.MULTILINE)


# -- waits --


ONE_RANK = (
    "",
    "--bf16",
    "--fp16 --initial-loss-scale 1",
    "--calculate-per-token-loss --bf16",
    ZERO1_BF16,
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def waits_with(place: Place, flags: str, on_meta: bool) -> Iterator[Finding]:
    """Those of one step."""
    (counts,) = place.launch(count_waits, 1, flags, on_meta)
    problems = beyond_what_is_allowed(counts)
    yield no_problems(f"waits in a step {flags}".rstrip(), len(counts), problems)


def host_waits(place: Place) -> Iterator[Finding]:
    """The program waits for its GPU in a step nowhere but where `host_syncs.ALLOWED` says."""
    on_meta = not place.is_gpu
    runs = [(flags, on_meta) for flags in ONE_RANK] + [(RECOMPUTED, False)]
    runs = runs[: 2 if place.is_quick else None]
    yield from each(*(partial(waits_with, place, *run) for run in runs))


# -- sharing --


def layouts(
    place: Place, cases: list[parity.Case], shared: bool = False, run: Any = parity.run_cases
) -> Iterator[Finding]:
    """Every case on real ranks against one process: losses, raw gradients, weights."""
    # This process computes the reference, where the ranks compute.
    set_device(place.device)
    with tempfile.TemporaryDirectory() as folder:
        work: dict[int, list] = {}
        for case in cases:
            path = parity.reference(case.serial(), Path(folder))
            work.setdefault(case.world, []).append((case, path))
        for world, of_world in work.items():
            compared: dict[str, int] = {str(case): 0 for case, _ in of_world}
            problems: dict[str, list[str]] = {str(case): [] for case, _ in of_world}
            for rank in place.launch(run, world, of_world, shared=shared):
                for case, number, _, found in rank:
                    compared[case] += number
                    problems[case] += found
            for case, number in compared.items():
                yield no_problems(f"{world} ranks, {case}", number, problems[case])


def staged_cases(work: list) -> list:
    """In a rank without a GPU: what is exchanged goes through copies, as it does on a shared GPU."""
    with staged():
        return parity.run_cases(work)


def over_gloo(run: Any, work: list) -> list:
    """In a rank: no memory is shared; gloo carries the messages too."""
    # Only here: who imports it has every launch load the libraries of the tests first.
    from tests.ranks import call_without_shared_memory

    return call_without_shared_memory(run, work)


def sharing(place: Place) -> Iterator[Finding]:
    """Four ranks on one GPU: what they send goes through the memory of the CPU."""
    zero1 = {"dist_opt": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    cases = [
        parity.Case(tp=2, pp=2),
        parity.Case(pp=4),
        parity.Case(tp=2, pp=2, vp=2, batched=False, overlap=True, deallocate=True),
        parity.Case(pp=2, dp=2, **zero1),
    ]
    if place.is_quick:
        cases = [parity.Case(pp=2), parity.Case(dp=2, **zero1)]
    run = parity.run_cases if place.is_gpu else staged_cases
    yield from layouts(place, cases, shared=True, run=run)
    without_memory = partial(over_gloo, run)
    for finding in layouts(place, [parity.Case(pp=2)], shared=True, run=without_memory):
        yield replace(finding, what=f"{finding.what}, all over gloo")
    yield from shared_backend.beside_the_numbers(place)


# -- inventory --


def inventory(place: Place) -> Iterator[Finding]:
    """What is here. A mode in which a GPU serves one process only is refused: ranks share one."""
    yield Finding("torch", torch.__version__)
    yield Finding("CUDA", str(torch.version.cuda))
    if not place.is_gpu:
        return
    gpus = range(place.num_gpus)
    yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    yield Finding("GPUs", ", ".join(torch.cuda.get_device_name(gpu) for gpu in gpus))
    names = [name_of_gpu(gpu) for gpu in gpus]
    what = "GPUs that torch can use, by their names"
    yield is_equal(what, len(set(names) - {""}), place.num_gpus)
    peers = [torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b]
    yield Finding("pairs that reach each other's memory", f"{sum(peers)} of {len(peers)}")
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding("compute modes", "unknown: there is no nvidia-smi")
        return
    said = subprocess.run(
        [program, "--query-gpu=compute_mode", "--format=csv"], capture_output=True, text=True
    )
    if said.returncode:
        yield Finding("compute modes", f"unknown: nvidia-smi ends with {said.returncode}")
        return
    modes = {line.strip() for line in said.stdout.splitlines()[1:]}
    yield is_equal("compute modes", modes, {"Default"})
