"""Numbers of a configuration: every field has a range, and is checked against it."""

import dataclasses
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from doge_fast.pipeline import config as configs
from doge_fast.pipeline.config import BaseConfig, ProxyConfig
from doge_fast.pipeline.config.ranges import check

# Which take any number; none may stand here without a reason.
FREE = {
    # Checked by the export against what float64 can repeat.
    ("ExportConfig", "decimals"),
}


def test_every_number_of_every_verb_has_a_range():
    free = set()
    for name, config in vars(configs).items():
        if not name.endswith("Config") or not dataclasses.is_dataclass(config):
            continue
        for field, hint in get_type_hints(config, include_extras=True).items():
            words = str(hint)
            if "Range(" not in words and any(
                kind in words for kind in ("'int'", "'float'", "int |")
            ):
                free.add((name, field))
    assert free == FREE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 2**32}, "at most 4294967295; got 4294967296."),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"mu": 10**400}, "mu must be a finite number"),
        ({"learning_rate": "1e-3"}, "learning_rate must be a finite number"),
        ({"validation_fraction": 1.0}, "greater than 0 and less than 1"),
        # A word is several letters.
        ({"target": "verse"}, "target must be a tuple of values"),
        ({"data": Path("folder")}, "data must be text (str); got"),
        ({"cache_dir": "cache"}, "cache_dir must be a pathlib.Path; got 'cache'."),
    ],
)
def test_what_is_out_of_its_range_is_named(proxy, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(proxy(**changes))


def test_defaults_lie_in_their_ranges():
    check(ProxyConfig(out=Path("never")))
    check(BaseConfig(out=Path("never")))
