"""Symptoms: each cause has a line here, one in Megatron and a check; cases equal the package's."""

import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.doctor import findings
from minimegatron.doctor.advice import ADVICE
from minimegatron.exercises.bench.gpt_step import StepCase, make_groups
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in (DOCS / "symptoms").glob("*.md") if path.stem != "index")
NEW_TOUR = [
    DOCS / "tour" / f"{name}.md" for name in ("one-gradient", "a-rank-died", "why-times-two")
]
IN_MEGATRON = re.compile(r"\{\{ megatron (\S+)#L(\d+) \}\} \(`([^`]+)`\)")

symptoms = importlib.import_module("cases.symptoms")
one_gradient = importlib.import_module("cases.one_gradient")
why_times_two = importlib.import_module("cases.why_times_two")


# -- The pages --


def causes_of(page: Path) -> dict[str, str]:
    """Heading with anchor -> text, of the section "Causes"."""
    text = page.read_text().partition("\n## Causes\n")[2].partition("\n## ")[0]
    parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_e_a_description_counts_its_causes(page):
    words = {"six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12}
    said = re.search(rf"({'|'.join(words)}) causes", page.read_text())
    assert said is None or words[said[1]] == len(causes_of(page))


def test_there_is_a_page_for_each_symptom():
    names = {page.stem for page in PAGES}
    assert names >= {
        "hang",
        "nan",
        "loss-factor",
        "out-of-memory",
        "slow",
        "resume",
        "gradient-norm",
    }
    index = (DOCS / "symptoms" / "index.md").read_text()
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f"]({page.name})" in index and f"symptoms/{page.name}" in nav
        likely = re.findall(rf"\]\({page.name}#([\w-]+)\)", index)
        anchors = [re.search(r"\{ #([\w-]+) \}", title)[1] for title in causes_of(page)]
        assert len(likely) >= 3 and set(likely) <= set(anchors)
        assert likely[0] == anchors[0], "the index names the likeliest cause first"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_cause_has_a_line_here_a_line_in_megatron_and_a_check(page):
    text = page.read_text()
    assert "\n## How it looks\n" in text and "\n## Tell the causes apart\n" in text
    causes = causes_of(page)
    assert len(causes) >= 7
    for title, body in causes.items():
        assert re.search(r"\{ #[\w-]+ \}$", title), title
        lines = {m[1]: m[2] for m in re.finditer(r"^- \*\*(\w+):\*\* (.+(?:\n  .+)*)", body, re.M)}
        assert list(lines) == ["Here", "Megatron", "Check"], title
        assert "{{ link minimegatron." in lines["Here"], title
        assert "{{ megatron " in lines["Megatron"], title
        assert len(lines["Check"]) > 15, title
    # The test in the second section leads to every cause, or nearly.
    apart = text.partition("\n## Tell the causes apart\n")[2].partition("\n## ")[0]
    anchors = [re.search(r"\{ #([\w-]+) \}", title)[1] for title in causes]
    assert sum(f"(#{anchor})" in apart for anchor in anchors) >= len(anchors) - 2


def test_lines_in_megatron_are_where_the_pages_say():
    found = find_spec("megatron.core")
    if found is None:
        pytest.skip("megatron-core is not installed")
    root = Path(found.origin).parents[1]
    checked, wrong = 0, []
    for page in [*PAGES, *NEW_TOUR]:
        for path, number, word in IN_MEGATRON.findall(page.read_text()):
            if not path.startswith("core/"):
                continue  # megatron.training is not in the package
            line = (root / path).read_text().splitlines()[int(number) - 1]
            checked += 1
            if word not in line:
                wrong.append(f"{page.name}: {path}#L{number} has no {word}: {line.strip()}")
    assert not wrong
    assert checked > 40


QUOTED = {
    "hang": {
        "doctor/advice.py": ["no rank has begun or ended a call."],
        "doctor/causes.py": ["No rank waits for another. This may be slow rather than stuck."],
    },
    "nan": {
        "training/result_words.py": ["look at its samples, lower --lr or --clip-grad, "],
        "core/distributed/grad_checks.py": [
            "gradients are not finite in bucket ",
            "before data-parallel summation: ",
        ],
    },
    "out-of-memory": {"training/failures.py": ["stops, because a rank is gone: "]},
    "slow": {
        "doctor/causes.py": ["No rank waits for another. This may be slow rather than stuck."]
    },
    "resume": {
        "training/checkpointing.py": [
            "random numbers are seeded anew: the checkpoint is of another layout",
            "loaded checkpoint of iteration ",
        ]
    },
}
"""Page -> file -> words that both have: what a page quotes is what is really printed."""


@pytest.mark.parametrize("page", QUOTED)
def test_quoted_words_are_those_of_the_program(page):
    text = (DOCS / "symptoms" / f"{page}.md").read_text()
    for path, phrases in QUOTED[page].items():
        source = (ROOT / "minimegatron" / path).read_text()
        for phrase in phrases:
            assert phrase in text and phrase in source


# -- Verdicts of the hang doctor --


def test_recorded_verdicts_are_of_kinds_that_the_doctor_still_knows():
    known = {getattr(findings, name) for name in dir(findings) if name.isupper()}
    record_verdicts = importlib.import_module("records.verdicts")
    hanging_ranks = importlib.import_module("records.hanging_ranks")
    verdicts = symptoms.verdicts()
    assert set(verdicts) == {*record_verdicts.LABS, *hanging_ranks.JOBS, symptoms.STOPPED}
    for name, one in verdicts.items():
        assert one["kind"] in known and one["kind"] in ADVICE
        # The advice that was printed is the one that would be printed now.
        assert record_verdicts.kind_of(one["lines"]) == one["kind"], name
        assert any(line.startswith("Why: ") for line in one["lines"])
        assert not re.search(r"/(tmp|home|work|root)/", "\n".join(one["lines"]))
    assert len({one["kind"] for one in verdicts.values()}) >= 9


def test_the_page_on_hangs_shows_each_verdict_as_it_was_printed():
    page = (DOCS / "symptoms" / "hang.md").read_text()
    shown = symptoms.all_verdicts()
    assert "{{ table symptoms.all_verdicts() }}" in page
    for name, one in symptoms.verdicts().items():
        assert f"{{ #{symptoms.anchor(name)} }}" in shown
        printed = [f"    {line}" if line else "" for line in one["lines"]]
        assert "\n".join(printed) in shown
    assert "all_reduce(torch.ones(8), dist.group.WORLD)" in symptoms.hanging_code(
        "data_of_unequal_length"
    )


# -- A rank that died --


def test_e_the_other_layout_skips_no_step_and_has_one_update_more():
    assert symptoms.skipped("whole") == symptoms.skipped("died") == [58]
    assert symptoms.skipped("other") == [] and symptoms.more_updates("other") == 1
    assert symptoms.doubled("whole")[-1] == symptoms.doubled("died")[-1] == 55
    page = (DOCS / "tour" / "a-rank-died.md").read_text()
    assert '{{ value symptoms.more_updates("other") }} update more' in page


def test_e_torchrun_ends_the_other_ranks_of_its_machine():
    """So it does in the recorded run: nobody waits there for a time-out."""
    ended = [
        n for n in symptoms.restart()["runs"]["died"]["lines"] if "closing signal SIGTERM" in n
    ]
    assert len(ended) == 3 and all("torchrun: Sending" in line for line in ended)
    for page in ("tour/launching.md", "symptoms/hang.md", "exam.toml"):
        text = " ".join((DOCS / page).read_text().split())
        assert re.search(r"torchrun`? ?(ends|--max-restarts)", text), page


def bytes_of_the_optimizer() -> list[float]:
    """In a rank: per bf16 parameter, what the optimizer has when it is built, and after a step."""
    groups = make_groups(StepCase())
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    module = torch.nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(config, ddp, module, pg_collection=groups)
    settings = OptimizerConfig(lr=1.0, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(settings, [chunk], pg_collection=groups)

    def held() -> float:
        states = optimizer.optimizer.state.values()
        moments = [t for state in states for t in state.values() if t.numel() > 1]
        return sum(t.nbytes for t in [*optimizer.get_parameters(), *moments]) / 64

    before = held()
    module.weight.main_grad.fill_(1.0)
    optimizer.step()
    return [before, held() - before]


def test_e_when_the_optimizers_bytes_come():
    (found,) = run_ranks(bytes_of_the_optimizer, 1)
    page = " ".join((DOCS / "symptoms" / "out-of-memory.md").read_text().split())
    built, stepped = map(int, found)
    assert f"{built} for the main parameter, which is made when the optimizer is built" in page
    assert f"{stepped} for Adam's moments, which are made in its first step" in page


def test_the_second_life_is_the_life_without_a_death():
    record_restart = importlib.import_module("records.restart")
    recorded = symptoms.restart()
    assert recorded["steps"] == {
        "saved": record_restart.SAVED,
        "dies": record_restart.DIES,
        "last": record_restart.LAST,
    }
    (whole,), (first, second), (before, _) = map(symptoms.losses, ("whole", "died", "other"))
    assert not before
    assert max(first) == record_restart.DIES - 1
    assert list(second) == list(range(record_restart.SAVED + 1, record_restart.LAST + 1))
    assert first.items() <= whole.items() and second.items() <= whole.items()
    assert recorded["differences"]["died"] == {"weights": 0.0, "moments": 0.0}
    assert 0 < recorded["differences"]["plain-other"]["weights"] < 1e-3
    assert recorded["saved"]["train_state"]["consumed_train_samples"] == (
        record_restart.SAVED * symptoms.SAMPLES_PER_STEP
    )
    text = json.dumps(recorded)
    assert not re.search(r"/(tmp|home|work|root)/", text) and "host-0" in text


# -- Why × 2 --


@pytest.mark.parametrize(("p", "v", "m"), why_times_two.SIZES)
def test_one_step_per_stage_waits_for_ever_and_two_do_not(p, v, m):
    assert why_times_two.is_stuck(1, p, m, v)
    assert not why_times_two.is_stuck(2, p, m, v)
    assert not why_times_two.is_stuck(1, p, m, v, overlap=True)
    assert len(why_times_two.traced(1, p, m, v).done.stuck) == p


def test_who_waits_for_whom_with_two_stages():
    rows = why_times_two.who_waits(1, 2, 4, 2)
    assert "| 0 | 3 | `g0→2` to come | exchange 4 of rank 1, which is in its exchange 4 |" in rows
    assert "| 1 | 4 | `a1→3` to come | exchange 4 of rank 0, which is in its exchange 3 |" in rows
    words = (DOCS / "tour" / "why-times-two.md").read_text()
    names = [wait.name for wait in why_times_two.waits(1, 2, 4, 2)]
    assert names == ["g0→2", "a1→3"] and all(f"`{name}`" in words for name in names)
    figure = why_times_two.exchange_figure(8)
    assert "waits for g0→2" in figure and "waits for a1→3" in figure
    assert "× 2: goes on to the end" in figure
    # The recorded lab stands in the same place: the gradient of microbatch 0, the activation of 1.
    lab = "\n".join(symptoms.verdicts()["interleaved-warm-up-once"]["lines"])
    assert "rank 0 waits for the gradient of microbatch 0" in lab
    assert "rank 1 waits for the activation of microbatch 1" in lab


# -- One gradient --


class OneWeight(torch.nn.Module):
    """The case of the page: a microbatch's summed loss is the weight times a number."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def set_input_tensor(self, tensors):
        pass

    def forward(self, total: float) -> torch.Tensor:
        return self.weight * total


def _gradient_on_ranks(returns: str, per_token: bool) -> list[float]:
    """On a rank: `main_grad` after finalize, and the gradient that the update rule gets."""
    groups = make_groups(StepCase())
    rank = groups.dp_cp.rank()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=2,
        num_attention_heads=1,
        params_dtype=torch.float64,
        calculate_per_token_loss=per_token,
    )
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(), OneWeight(config), pg_collection=groups
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=0.1,
            params_dtype=torch.float64,
            fp16=True,
            loss_scale=one_gradient.LOSS_SCALE,
        ),
        [ddp],
        pg_collection=groups,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    ddp.zero_grad_buffer()

    def forward_step(data_iterator, model):
        total, n = next(data_iterator)
        return model(total), one_gradient.loss_function(returns, n, n)

    sums, counts = one_gradient.SUMS[rank], one_gradient.COUNTS[rank]
    forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(list(zip(sums, counts, strict=True))),
        model=ddp,
        num_microbatches=len(sums),
        seq_length=1,
        micro_batch_size=1,
        pg_collection=groups,
    )
    finalized = float(ddp.module.weight.main_grad)
    assert not optimizer.prepare_grads()
    (main_param,) = optimizer.get_parameters()
    return [finalized, float(main_param.grad)]


def _gradients_on_ranks() -> dict[str, list[float]]:
    return {
        f"{returns} {on}": _gradient_on_ranks(returns, on)
        for returns in (one_gradient.SUM, one_gradient.MEAN)
        for on in (False, True)
    }


def test_the_followed_gradient_is_that_of_real_ranks():
    for found in run_ranks(_gradients_on_ranks, len(one_gradient.SUMS)):
        for returns in (one_gradient.SUM, one_gradient.MEAN):
            for on in (False, True):
                one = one_gradient.follow(returns, on)
                got = found[f"{returns} {on}"]
                assert got == pytest.approx([one.after_finalize, one.after_unscale], rel=1e-12)


def test_the_ends_are_those_that_the_page_names():
    off, on = one_gradient.follow(per_token=False), one_gradient.follow(per_token=True)
    tokens = sum(map(sum, one_gradient.COUNTS))
    means = [
        s / n
        for ss, ns in zip(one_gradient.SUMS, one_gradient.COUNTS, strict=True)
        for s, n in zip(ss, ns, strict=True)
    ]
    assert off.after_unscale == pytest.approx(sum(means) / len(means))
    assert on.after_unscale == pytest.approx(sum(map(sum, one_gradient.SUMS)) / tokens)
    assert (off.num_tokens, on.num_tokens) == (1, tokens)
    wrong = one_gradient.follow(one_gradient.MEAN, True)
    right = one_gradient.follow(one_gradient.MEAN, False)
    assert wrong.after_unscale == pytest.approx(len(one_gradient.SUMS) * right.after_unscale)
    cases = importlib.import_module("cases.cases")
    assert (cases.COUNTS, cases.SUMS) == (one_gradient.COUNTS, one_gradient.SUMS)


def test_factors_with_context_ranks():
    sums, counts = ((16, 16), (16, 16)), ((8, 8), (8, 8))
    factors = {
        (returns, on): one_gradient.follow(returns, on, 2, sums, counts).after_unscale / 2
        for returns in (one_gradient.SUM, one_gradient.MEAN, one_gradient.OWN_MEAN)
        for on in (False, True)
    }
    d, c = 2, 2
    assert factors == pytest.approx(
        {
            (one_gradient.SUM, False): 1,
            (one_gradient.SUM, True): 1,
            (one_gradient.MEAN, False): 1,
            (one_gradient.MEAN, True): d * c,
            (one_gradient.OWN_MEAN, False): c,
            (one_gradient.OWN_MEAN, True): d * c * c,
        }
    )
