"""minimegatron: Megatron's training step, small enough to read.

`minimegatron.core` and `minimegatron.training` mirror `megatron.core` and `megatron.training`.
The torch-free parts (planner, rank arithmetic, layouts) load where torch does not exist, so this file
imports nothing that needs it. `launch`, `trace` and `pace` are looked up on first use.
"""

import sys

from minimegatron.core.left_out import OurModules
from minimegatron.exports import lazily, put_stand_ins

__version__ = "0.1.0"

if OurModules not in sys.meta_path:
    sys.meta_path.insert(0, OurModules)
    put_stand_ins(sys.modules[__name__])  # it and the next are here before their finder
    put_stand_ins(sys.modules["minimegatron.core"])

__getattr__, __dir__ = lazily(
    __name__,
    {
        "launch": "minimegatron.launching.launcher:launch",
        "trace": "minimegatron.tracing.recorder:trace",
        "pace": "minimegatron.tracing.pace:pace",
    },
)
