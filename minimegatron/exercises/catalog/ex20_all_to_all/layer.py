"""What of a layer is right: who comes where, the outputs, and the gradients.

Megatron has no counterpart.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex20_all_to_all.data import (
    HIDDEN,
    WORLD,
    Tokens,
    expert_weight,
    members,
    run_expert,
)
from minimegatron.exercises.check import Case, Result, Wrong

NO_GRADIENT = {
    "of_hidden": "Each step on the way must have a backward.",
    "of_probs": "The router learns through them alone. What sends them must have a backward, too.",
}

SMALL = 1024
"""Bytes that are no matter: numbers of tokens, however they are written."""

# -- The order --


def judge_order(case: Case, answers: Sequence[dict[str, Any]]) -> None:
    """Rows by expert, the probability of each, and the sums on the way back."""
    for rank, answer in enumerate(answers):
        given = Tokens(case, rank)
        pairs = [
            (e, t) for e in range(case.local) for t, own in enumerate(given.chosen) if e in own
        ]
        numbers = [int(number) for number in answer["indices"].tolist()]
        _judge_numbers(rank, given, pairs, numbers)
        check_known("the permuted tokens", answer["tokens"], given.hidden[numbers], rank=rank)
        order = _experts_in_turn(pairs, numbers)
        wanted = given.probs[numbers, order]
        check_known("the permuted probs", answer["probs"], wanted, rank=rank)
        copies = given.map.sum(dim=1, keepdim=True)
        once = given.hidden * (copies > 0)
        lost = [
            (once, "A token that chose two experts got one of its rows: rows must be added up.")
        ]
        total = given.hidden * copies
        check_known("what unpermute makes of permute's tokens", answer["total"], total, lost, rank)
        copies = copies.double().expand_as(given.hidden)
        check_known("the gradient of the tokens", answer["of_tokens"], copies, rank=rank)
        wanted = torch.zeros_like(given.probs)
        wanted[numbers, order] = torch.arange(1.0, len(numbers) + 1, dtype=torch.float64)
        check_known("the gradient of the probs", answer["of_probs"], wanted, rank=rank)


def _judge_numbers(
    rank: int, given: Tokens, pairs: list[tuple[int, int]], numbers: list[int]
) -> None:
    experts = sorted({expert for expert, _ in pairs})
    begin = 0
    for expert in experts:
        wanted = sorted(token for other, token in pairs if other == expert)
        found = numbers[begin : begin + len(wanted)]
        if sorted(found) != wanted:
            lines = [
                f"rank {rank}: rows {begin} to {begin + len(wanted) - 1} of permute are tokens "
                f"{found}; expert {expert} was chosen by {wanted}"
            ]
            by_token = [t for t, own in enumerate(given.chosen) for _ in own]
            if numbers == by_token:
                lines.append("They are ordered by token. A rank's experts need theirs together.")
            raise Wrong("\n".join(lines))
        begin += len(wanted)


def _experts_in_turn(pairs: list[tuple[int, int]], numbers: list[int]) -> list[int]:
    """The expert of each row; rows of one expert may stand in any order."""
    return [expert for expert, _ in pairs][: len(numbers)]


# -- A layer --


def judge_layer(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """What came, what went back, and all gradients."""
    given = [Tokens(case, rank) for rank in range(WORLD)]
    for rank, answer in enumerate(answers):
        _judge_came(case, rank, given, answer)
    outputs, gradients = _one_process(case, given)
    for rank, answer in enumerate(answers):
        own, needed = given[rank].hidden.nbytes, int(given[rank].map.sum()) * HIDDEN * 8
        judge_sent(f"rank {rank}: dispatch", "token", own, needed, answer["sent"])
        came = sum(answer["counts"]) * HIDDEN * 8
        judge_sent(f"rank {rank}: combine", "result", came, came, answer["sent_back"])
        if not torch.allclose(answer["before"], answer["output"]):
            raise Wrong(
                f"rank {rank}: combine gives other numbers after another dispatch than before it, of "
                "the same outputs and the same state\nSeveral microbatches may be under way. What does "
                "combine read beside its two arguments?"
            )
        hints = list(_wrong_outputs(case, rank, given))
        check_known("combine's output", answer["output"], outputs[rank], hints, rank)
    for rank, answer in enumerate(answers):
        _judge_gradients(case, rank, given, gradients, answer)
    rows = [sum(answers[rank]["counts"]) for rank in range(WORLD)]
    return Result({"rows that came": f"{rows}", "sent by rank 0": _sent_words(answers[0]["sent"])})


def _sent_words(sent: list[list[Any]]) -> str:
    return ", ".join(f"{name} of {num_bytes} bytes" for name, num_bytes in sent)


def judge_sent(who: str, one: str, own: int, needed: int, sent: list[list[Any]]) -> None:
    """Wrong if all of the rank's own rows, `own` bytes, went everywhere, or more than `needed` did."""
    to_one = sum(size for name, size in sent if name.endswith(("all-to-all", " send")))
    received = sum(size for name, size in sent if name.endswith(" recv"))
    to_all = sum(size for _, size in sent) - to_one - received
    if to_all >= own > SMALL:
        raise Wrong(
            f"{who} gives every rank {to_all} bytes, as much as all its {one}s\nThen every {one} "
            "goes to every rank. Which rank needs which of them? Send it there, and nowhere else."
        )
    if to_one > 1.5 * needed + SMALL:
        raise Wrong(
            f"{who} sends {to_one} bytes; the {one}s that somebody needs have {needed}\nEach "
            "rank gets some that it throws away. Which of them chose an expert there?"
        )


def _judge_came(case: Case, rank: int, given: list[Tokens], answer: dict[str, Any]) -> None:
    """Each local expert has the rows of the tokens that chose it, with their probabilities."""
    group, first = members(case, rank), rank % case.ep * case.local
    wanted = [
        [
            (source, token)
            for source in group
            for token, own in enumerate(given[source].chosen)
            if e in own
        ]
        for e in range(first, first + case.local)
    ]
    sizes = [len(one) for one in wanted]
    if answer["counts"] != sizes:
        why = "They are in another order." if sorted(answer["counts"]) == sorted(sizes) else ""
        raise Wrong(
            f"rank {rank}: tokens_per_expert is {answer['counts']}, expected {sizes} for experts "
            f"{list(range(first, first + case.local))}\n{why or _sources(group, given, first, case)}"
        )
    begin = 0
    for number, pairs in enumerate(wanted):
        expert, left = first + number, list(pairs)
        for row in range(begin, begin + len(pairs)):
            found = _whose(answer["tokens"][row], group, given)
            where = f"rank {rank}: row {row} of dispatch's tokens"
            if found not in left:
                raise Wrong(
                    f"{where} is {_pair_words(found, given)}, but it stands among the {len(pairs)} "
                    f"rows of expert {expert}\nWhat comes is ordered by the rank it comes from. All "
                    "rows of an expert must stand together, from whichever rank."
                )
            left.remove(found)
            source, token = found
            _judge_prob(where, answer["probs"][row], given[source], token, expert)
        begin += len(pairs)


def _sources(group: list[int], given: list[Tokens], first: int, case: Case) -> str:
    rows = [
        [int(given[source].map[:, e].sum()) for e in range(first, first + case.local)]
        for source in group
    ]
    return f"From the ranks of the group came, for these experts: {rows}."


def _whose(row: torch.Tensor, group: list[int], given: list[Tokens]) -> tuple[int, int] | None:
    """(rank, token) of a row."""
    for source in group:
        for token, hidden in enumerate(given[source].hidden):
            if torch.equal(row, hidden):
                return source, token
    return None


def _pair_words(found: tuple[int, int] | None, given: list[Tokens]) -> str:
    if found is None:
        return "no token of this group"
    source, token = found
    return f"token {token} of rank {source}, which chose experts {given[source].chosen[token]}"


def _judge_prob(where: str, prob: torch.Tensor, given: Tokens, token: int, expert: int) -> None:
    right = given.probs[token, expert]
    if torch.allclose(prob, right):
        return
    others = [
        e
        for e in given.chosen[token]
        if e != expert and torch.allclose(prob, given.probs[token, e])
    ]
    if others:
        why = f"That is the one of the same token and expert {others[0]}."
    elif float(prob) == 1.0:
        why = "It is 1. The expert weighs its output here, so the weight must come with the token."
    else:
        why = "A token's probabilities travel with its rows, in the same order."
    raise Wrong(f"{where} comes with the probability {prob:.6g}, expected {right:.6g}\n{why}")


# -- One process --


def _one_process(case: Case, given: list[Tokens]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Each rank's outputs; gradients of hidden, probs, and by group of the experts."""
    hidden = [one.hidden.clone().requires_grad_() for one in given]
    probs = [one.probs.clone().requires_grad_() for one in given]
    experts = {
        (rank // case.ep, e): expert_weight(case, rank, e).requires_grad_()
        for rank in range(0, WORLD, case.ep)
        for e in range(case.ep * case.local)
    }
    outputs = []
    for rank in range(WORLD):
        own = [experts[rank // case.ep, e] for e in range(case.ep * case.local)]
        weighed = [
            run_expert(hidden[rank], weight, probs[rank][:, e]) for e, weight in enumerate(own)
        ]
        outputs.append(sum(weighed) + 0 * hidden[rank])
    sum((out * one.grad).sum() for out, one in zip(outputs, given, strict=True)).backward()
    gradients = {
        "of_hidden": [one.grad for one in hidden],
        # Of an expert that was not chosen there is no probability.
        "of_probs": [one.grad * each.map for one, each in zip(probs, given, strict=True)],
        "of_experts": {key: weight.grad for key, weight in experts.items()},
    }
    return [out.detach() for out in outputs], gradients


def _wrong_outputs(case: Case, rank: int, given: list[Tokens]) -> Any:
    """What usual mistakes give."""
    one = given[rank]
    weighed = [
        run_expert(one.hidden, expert_weight(case, rank, e), one.probs[:, e])
        for e in range(case.ep * case.local)
    ]
    plain = sum(
        run_expert(one.hidden, expert_weight(case, rank, e), one.map[:, e].double())
        for e in range(case.ep * case.local)
    )
    twice = sum(part * one.probs[:, e].unsqueeze(1) for e, part in enumerate(weighed))
    yield plain, "The experts' outputs are in it, but not the probabilities."
    yield twice, "The probabilities are in it twice: the experts have multiplied by them already."
    last = torch.zeros_like(one.hidden)
    for part, chosen in zip(weighed, one.map.t(), strict=True):
        last = torch.where(chosen.unsqueeze(1), part, last)
    yield last, "Of a token's rows one is there, and the others are lost: they must be added up."


def _judge_gradients(
    case: Case, rank: int, given: list[Tokens], right: dict[str, Any], answer: dict[str, Any]
) -> None:
    own, e = given[rank], rank % case.ep * case.local
    for name, words in (("of_hidden", "hidden"), ("of_probs", "probs")):
        found, wanted = answer[name], right[name][rank]
        if found is None and wanted.any():
            raise Wrong(f"rank {rank}: no gradient came back to {words}\n{NO_GRADIENT[name]}")
        if found is not None:
            found = found * own.map if name == "of_probs" else found
            check_known(f"the gradient of {words}", found, wanted, rank=rank)
    for number, found in enumerate(answer["of_experts"]):
        wanted = right["of_experts"][rank // case.ep, e + number]
        if found is None:
            raise Wrong(
                f"rank {rank}: expert {e + number} has no gradient at all, not even zeros\nIt was run, "
                "with no tokens if none came. Its output must go back through combine also then: other "
                "ranks wait for gradients, and for this one's."
            )
        check_known(f"the gradient of expert {e + number}'s weight", found, wanted, rank=rank)
