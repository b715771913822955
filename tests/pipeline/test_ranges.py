"""Values of a configuration: each is checked against the type and range of its field."""

import re
from pathlib import Path

import pytest

from doge_fast.pipeline.config.ranges import check


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
