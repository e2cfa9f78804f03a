"""What checks import is imported once, in the process that ranks are forked from."""

from minimegatron import launcher
from minimegatron.exercises.runner import PRELOADED

launcher.PRELOADED += [name for name in PRELOADED if name not in launcher.PRELOADED]
