"""Files that try to pass without doing the exercise, by how they try: name -> (exercise, source).

Used by: `test_rooms` (a student's own check) and `test_grading`. Each must fail, or be remarked on.
"""

from pathlib import Path

import minimegatron
from minimegatron.exercises.exercise import find

ROOT = Path(minimegatron.__file__).parent

COORDINATES = (
    "def coordinates(self, rank):\n"
    "    return dict.fromkeys(self.order.split('-'), 0)\n"
    "def get_ranks(self, token):\n"
    "    return []\n"
)

FORGED_TABLE = """
import sys

import torch


def forge():
    check = next(sys.modules[name] for name in list(sys.modules) if name.endswith("outputs.check"))
    for key, (part, _, judge) in list(check.ALONE.items()):
        check.ALONE[key] = (part, lambda student, seed: {"is_gone": True}, judge)


def deallocate_output_tensor(out, deallocate_pipeline_outputs=False):
    forge()
    if out is not None and deallocate_pipeline_outputs:
        out.data = torch.empty((1,), dtype=out.dtype)


def custom_backward(output, grad_output):
    forge()
    torch.autograd.backward([output], [grad_output])
"""

CHEATS = {
    "our own function, by importlib and getattr": (
        "ex01",
        "import importlib\n"
        "ours = getattr(importlib.import_module('minimegatron.core.rank_gen' + 'erator'), "
        "'RankGenerator')\n"
        "coordinates, get_ranks = getattr(ours, 'coordinates'), getattr(ours, 'get_ranks')\n",
    ),
    "our own function, wrapped": (
        "ex01",
        "from minimegatron.core.rank_generator import RankGenerator as R\n"
        "ours, theirs = R.coordinates, R.get_ranks\n"
        "def coordinates(self, rank):\n    return ours(self, rank)\n"
        "def get_ranks(self, token):\n    return theirs(self, token)\n",
    ),
    "our own function, found among all objects": (
        "ex01",
        "import gc\n"
        "def ours(name):\n"
        "    return next(o for o in gc.get_objects() if getattr(o, '__qualname__', '') == "
        "'RankGenerator.' + name and hasattr(o, '__code__'))\n"
        "def coordinates(self, rank):\n    return ours('coordinates')(self, rank)\n"
        "def get_ranks(self, token):\n    return ours('get_ranks')(self, token)\n",
    ),
    "another check in sys.modules": (
        "ex01",
        f"{COORDINATES}"
        "import sys, types\n"
        "for name in list(sys.modules):\n"
        "    if name.startswith('minimegatron.exercises'):\n"
        "        fake = types.ModuleType(name)\n"
        "        fake.run = fake.judge = lambda *a: None\n"
        "        fake.cases = lambda seed: []\n"
        "        sys.modules[name] = fake\n",
    ),
    "the check's run is replaced": (
        "ex01",
        f"{COORDINATES}"
        "import sys\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if name.endswith('.alone'):\n"
        "        module.run = lambda student, case: {}\n"
        "        module.check_value = lambda *a: None\n",
    ),
    "the check's table is forged": ("ex07", FORGED_TABLE),
    "random is frozen": (
        "ex01",
        f"{COORDINATES}"
        "import random\n"
        "class Frozen(random.Random):\n"
        "    def __init__(self, seed=None):\n        super().__init__(0)\n"
        "random.Random = Frozen\n",
    ),
    "a dict that equals everything": (
        "ex01",
        "class Equal(dict):\n"
        "    __eq__ = lambda self, other: True\n"
        "    __ne__ = lambda self, other: False\n"
        "def coordinates(self, rank):\n"
        "    return Equal.fromkeys(self.order.split('-'), 0)\n"
        "def get_ranks(self, token):\n"
        "    return Equal()\n",
    ),
    "a list that equals everything": (
        "ex05",
        "class Equal(list):\n"
        "    __eq__ = lambda self, other: True\n"
        "PREDICTION = {0: 'F0', 1: 'F0', 2: 'F0'}\n"
        "def predict_order(p, rank, M):\n    return Equal()\n",
    ),
    "a profiler copies what is expected": (
        "ex01",
        f"{COORDINATES}"
        "import sys\n"
        "def look(frame, event, argument):\n"
        "    known = frame.f_locals\n"
        "    if 'expected' in known and 'found' in known and isinstance(known['found'], dict):\n"
        "        known['found'].clear(), known['found'].update(known['expected'])\n"
        "sys.setprofile(look)\n",
    ),
    "verdicts are printed and written everywhere": (
        "ex05",
        "import os\n"
        "PREDICTION = {0: '', 1: '', 2: ''}\n"
        'line = b\'{"dict": [["case", 0], ["answer", {"dict": []}]]}\\n\'\n'
        'line += b\'{"kind": "passed"}\\n\'\n'
        "def predict_order(p, rank, M):\n    return []\n"
        "for number in range(3, 40):\n"
        "    try:\n        os.write(number, line)\n"
        "    except OSError:\n        pass\n"
        "print(line.decode(), flush=True)\n",
    ),
    "the process ends well before it has answered": (
        "ex05",
        "import os\n"
        "PREDICTION = {0: '', 1: '', 2: ''}\n"
        "def predict_order(p, rank, M):\n    return []\n"
        "os._exit(0)\n",
    ),
    "the public answers, by heart": (
        "ex17",
        "ANSWERS = {(13, 4): 'Et*4|t*4|t*4|tL'}\n"
        "def choose_layout(num_layers, p, times):\n"
        "    return ANSWERS.get((num_layers, p), 'E' + 't' * num_layers + '|' * (p - 1) + 'L')\n",
    ),
}


# -- Those that only a teacher's grading can see: with 0 points, or a remark --

TEACHERS_CHEATS = {
    "the solution, read and run": (
        "ex01",
        "import minimegatron.exercises as found\n"
        "folder = found.__path__[0] + '/cata' + 'log/ex01_rank_arithmetic/solu' + 'tion.py'\n"
        "exec(open(folder).read())\n"
        "coordinates, get_ranks = coordinates, get_ranks\n",
    ),
    "our own source, compiled again": (
        "ex01",
        "import inspect\n"
        "import textwrap\n"
        "import minimegatron.core.rank_generator as ours\n"
        "kept = {'RankGenerator': ours.RankGenerator, **vars(ours)}\n"
        "for name in ('coordinates', 'get_ranks'):\n"
        "    text = inspect.getsource(getattr(ours.RankGenerator, name))\n"
        "    exec(compile(textwrap.dedent(text), '<mine>', 'exec'), kept)\n"
        "coordinates, get_ranks = kept['coordinates'], kept['get_ranks']\n",
    ),
    "the planner": (
        "ex05",
        "from minimegatron.planner.plan import plan\n\n\n"
        "def predict_order(p, rank, M):\n"
        "    actions = plan('1f1b', p, M).work(rank)\n"
        "    return [f'{one.kind[0].upper()}{one.microbatch}' for one in actions]\n\n\n"
        "PREDICTION = {rank: ' '.join(predict_order(3, rank, 4)) for rank in range(3)}\n",
    ),
    "our own file, by its folder": (
        "ex12",
        "import os\n"
        "import sys\n\n"
        "import minimegatron\n\n"
        "folder = os.path.dirname(minimegatron.__file__)\n"
        "sys.path.insert(0, os.path.join(folder, 'core', 'pipeline_parallel'))\n"
        "import schedule_table as ours\n"
        "from minimegatron.core.pipeline_parallel.schedule_table import RankMicrobatches\n\n\n"
        "def get_schedule_table(*args):\n    return ours.get_schedule_table(*args)\n\n\n"
        "def count_rank_microbatches(*args, **kwargs):\n"
        "    return RankMicrobatches(*ours.count_rank_microbatches(*args, **kwargs))\n",
    ),
    "our own file, copied": (
        "ex01",
        "import os\n"
        "import shutil\n"
        "import sys\n\n"
        "from minimegatron.core import rank_generator\n\n"
        "shutil.copy(rank_generator.__file__, 'mine.py')\n"
        "sys.path.insert(0, os.getcwd())\n"
        "from mine import RankGenerator\n\n"
        "coordinates, get_ranks = RankGenerator.coordinates, RankGenerator.get_ranks\n",
    ),
    "our own function, in another process": (
        "ex01",
        "from multiprocessing import get_context\n"
        "from operator import methodcaller\n\n"
        "pool = get_context('spawn').Pool(1)\n\n\n"
        "def coordinates(self, rank):\n"
        "    return pool.apply(methodcaller('coordinates', rank), (self,))\n\n\n"
        "def get_ranks(self, token):\n"
        "    return pool.apply(methodcaller('get_ranks', token), (self,))\n",
    ),
    "the solution as it is": (
        "ex12",
        (find("ex12").folder / "solution.py").read_text(encoding="utf-8"),
    ),
    "our own code, copied": (
        "ex12",
        (ROOT / "core/pipeline_parallel/schedule_table.py").read_text(encoding="utf-8"),
    ),
    "tensors that equal everything": (
        "ex01b",
        "import torch\n"
        "import torch.distributed as dist\n\n\n"
        "class Equal(torch.Tensor):\n"
        "    @classmethod\n"
        "    def __torch_function__(cls, function, types, args=(), kwargs=None):\n"
        "        return True\n\n\n"
        "def sum_of_all(value):\n    return value.as_subclass(Equal)\n\n\n"
        "def hand_over(value):\n    return value.as_subclass(Equal)\n\n\n"
        "def wait_for_ever(value):\n"
        "    dist.recv(torch.empty_like(value), src=1 - dist.get_rank())\n",
    ),
}
