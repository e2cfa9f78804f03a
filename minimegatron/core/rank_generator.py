"""Which ranks talk to each other: the whole arithmetic of process groups, without a process.

Torch-free. Megatron keeps `RankGenerator` inside `megatron.core.parallel_state`.

The idea: give every rank one coordinate per way of being parallel, and number the ranks like the
cells of an array, the first word of `order` changing fastest. With "tp-cp-ep-dp-pp":

    rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank))

A group is the set of ranks that agree in every coordinate but those its name mentions: the tensor
group differs in tp alone, the model group in tp and pp.

There are two such grids over the same ranks. The dense one (attention, MLP) has tp x cp x dp x pp
cells; the expert one (mixture-of-experts layers) has etp x ep x edp x pp. They share their pipeline
groups, because a dense layer and the expert layer after it live on the same stage.
"""

from collections.abc import Callable
from dataclasses import dataclass

from minimegatron.core.rank_checks import (
    check_cell,
    check_grid,
    check_layout,
    check_same_pipelines,
    check_token,
)

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Tensor-parallel ranks side by side (they talk most), pipeline stages far apart."""


class RankGenerator:
    """One grid of ranks, and the groups cut out of it.

    `tp`, `ep`, `dp`, `pp`, `cp` are the sizes; `order` names the coordinates, the fastest-changing
    first. A coordinate of size 1 may be left out of `order`. Ranks start at `rank_offset`.

    Source: `megatron.core.parallel_state.RankGenerator`. Raises ValueError for sizes below 1, for
    an `order` that repeats a word, has one it should not or lacks one it needs, and for ep and cp
    both above 1 (cp belongs to the dense grid, ep to the expert grid).

    >>> grid = RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1, order="tp-dp-pp")
    >>> grid.get_ranks("pp")
    [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    >>> grid.get_ranks("tp-pp")
    [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    >>> grid.coordinates(6)
    {'tp': 0, 'dp': 1, 'pp': 1, 'ep': 0, 'cp': 0}
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0
    ) -> None:
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        check_grid(self.name_to_size, order, DEFAULT_ORDER)
        words = order.lower().split("-")
        words += [name for name in self.name_to_size if name not in words]  # each of size 1
        self.order = "-".join(words)
        self.ordered_size = [self.name_to_size[word] for word in words]
        self.world_size = 1
        self.stride = {}
        """How far apart two ranks are that are neighbours along one coordinate."""
        for word, size in zip(words, self.ordered_size, strict=True):
            self.stride[word] = self.world_size
            self.world_size *= size

    def get_ranks(self, token: str) -> list[list[int]]:
        """All groups that vary in the coordinates `token` names ("tp", "tp-pp", ...), as ranks.

        Every rank is in exactly one of them. Ranks within a group ascend, and the groups ascend by
        their first rank. Raises ValueError for a word that names no coordinate.
        """
        inside = token.lower().split("-")
        check_token(token, self.name_to_size)
        words = self.order.split("-")
        first_ranks = self._walk([word for word in words if word not in inside])
        steps = self._walk([word for word in words if word in inside])
        return [[self.rank_offset + first + step for step in steps] for first in first_ranks]

    def _walk(self, words: list[str]) -> list[int]:
        """Distances from the first cell to every cell of the sub-grid over `words`, ascending."""
        cells = [0]
        for word in words:
            ahead = [index * self.stride[word] for index in range(self.name_to_size[word])]
            cells = [step + cell for step in ahead for cell in cells]
        return cells

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of `rank` along every coordinate, in the order of `order`."""
        cell = rank - self.rank_offset
        check_cell(cell, self.world_size, self.rank_offset)
        return {
            word: cell // self.stride[word] % self.name_to_size[word]
            for word in self.order.split("-")
        }


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold word embeddings: the first, and the last for the head."""
    return [pp_ranks[0]] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold position embeddings: the first stage."""
    return [pp_ranks[0]]


@dataclass(frozen=True)
class GroupKind:
    """One kind of process group.

    `name` is its field in `ProcessGroupCollection`, `title` what people call it. `grid` says which
    grid it is cut from and `token` along which coordinates; the two embedding kinds are picked from
    the pipeline groups instead and have no token.
    """

    name: str
    title: str
    grid: str
    token: str | None


GROUP_KINDS = (
    GroupKind("tp", "tensor", "dense", "tp"),
    GroupKind("pp", "pipeline", "dense", "pp"),
    GroupKind("mp", "model (tensor + pipeline)", "dense", "tp-pp"),
    GroupKind("dp", "data", "dense", "dp"),
    GroupKind("cp", "context", "dense", "cp"),
    GroupKind("dp_cp", "data + context", "dense", "dp-cp"),
    GroupKind("tp_cp", "tensor + context", "dense", "tp-cp"),
    GroupKind("tp_dp", "tensor + data", "dense", "tp-dp"),
    GroupKind("tp_dp_cp", "tensor + data + context", "dense", "tp-dp-cp"),
    GroupKind("embd", "embedding", "dense", None),
    GroupKind("pos_embd", "position embedding", "dense", None),
    GroupKind("ep", "expert", "expert", "ep"),
    GroupKind("expt_tp", "expert tensor", "expert", "tp"),
    GroupKind("expt_dp", "expert data", "expert", "dp"),
    GroupKind("tp_ep", "tensor + expert", "expert", "tp-ep"),
    GroupKind("tp_ep_pp", "tensor + expert + pipeline", "expert", "tp-ep-pp"),
)
"""Every kind, in the order in which every rank creates its process groups."""


def make_grids(
    world_size: int,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = DEFAULT_ORDER,
) -> tuple[RankGenerator, RankGenerator]:
    """The dense and the expert grid over the same `world_size` ranks.

    Data-parallel sizes are what is left: dp = world_size / (tp * cp * pp) in the dense grid,
    edp = world_size / (etp * ep * pp) in the expert grid. `etp` None means `tp`.

    Raises ValueError for sizes that do not divide `world_size`, for a bad `order`, and where the
    two grids would not have the same pipeline groups.
    """
    etp = tp if etp is None else etp
    check_layout(world_size, tp, pp, cp, ep, etp)
    dp, edp = world_size // (tp * cp * pp), world_size // (etp * ep * pp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    check_same_pipelines(dense, expert, order, DEFAULT_ORDER)
    return dense, expert


def all_groups(
    world_size: int,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
) -> dict[str, list[list[int]]]:
    """Every group of every kind of `GROUP_KINDS`: kind name -> groups -> global ranks.

    The two functions pick, from one pipeline's ranks (first stage first), those that hold word and
    position embeddings. Raises ValueError as `make_grids` does.

    Two nodes of 8 GPUs, g0..g7 and g8..g15, each layer split over 2, the layers over 4 stages:

    >>> groups = all_groups(world_size=16, tp=2, pp=4)
    >>> groups["tp"]
    [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    >>> groups["pp"]
    [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    >>> groups["mp"]
    [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    >>> groups["dp"]
    [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    >>> groups["embd"]
    [[0, 12], [1, 13], [2, 14], [3, 15]]

    Every tensor and every data group stays inside a node; pipelines cross, from 4 to 8 for example.
    """
    dense, expert = make_grids(world_size, tp, pp, cp, ep, etp, order)
    grids = {"dense": dense, "expert": expert}
    pipelines = dense.get_ranks("pp")
    picked = {
        "embd": get_embedding_ranks or default_embedding_ranks,
        "pos_embd": get_position_embedding_ranks or default_position_embedding_ranks,
    }
    groups = {}
    for kind in GROUP_KINDS:
        if kind.token is not None:
            groups[kind.name] = grids[kind.grid].get_ranks(kind.token)
        else:
            groups[kind.name] = [list(picked[kind.name](ranks)) for ranks in pipelines]
    return groups
