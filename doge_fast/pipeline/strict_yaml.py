"""YAML and JSON that a person wrote, without what a reader would pass over in silence."""

import json
import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses numbers that other readers take for others."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """As SafeLoader's, which reads 010 as 8, and 1:30 as 90."""
        if re.fullmatch(r"[-+]?0[0-9_]+|.*:.*", node.value):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value} is octal or minutes to some readers and not to others; write plain "
                "digits, or quotes around it",
                node.start_mark,
            )
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load(text: str) -> Any:
    """What a YAML or JSON text holds.

    Raises:
        yaml.YAMLError: it is neither.
        ValueError: a value contains itself.
        RecursionError: it is nested too deep.
    """
    value = yaml.load(text, Loader=_Loader)
    # An anchor may stand inside what it names.
    json.dumps(value, default=str, skipkeys=True)
    return value
