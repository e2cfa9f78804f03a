"""Done once, in the process that the tests' ranks are forked from, instead of in each of them.

Imported by that process: see `PRELOADED` in tests/ranks.py. The words about the arguments of a run
are read from the source text, which takes a fifth of a second, and kept.
"""

from minimegatron.training.arguments import _build_parser

_build_parser(None, {})
