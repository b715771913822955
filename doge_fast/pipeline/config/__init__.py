# ruff: noqa: F403
"""One frozen dataclass per verb: its options, which its run directory records.

The command line is made from these classes: a field is an option, its docstring the help text.
They import nothing heavy, so a configuration can be read where the pipeline is not installed.
"""

from doge_fast.pipeline.config.search import *
from doge_fast.pipeline.config.stages import *
from doge_fast.pipeline.config.tools import *
