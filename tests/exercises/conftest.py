"""What checks import is imported once, in the process that ranks are forked from."""

from minimegatron.exercises.check.runner import PRELOADED
from minimegatron.launching import launcher

launcher.PRELOADED += [name for name in PRELOADED if name not in launcher.PRELOADED]
