"""The refusal of checkpoints and weights.json files that removed methods have written."""

LAST_WITH_IT = "before-the-card"
"""The git tag of the last commit with the removed methods."""


def refusal(what: str) -> str:
    """The message that refuses a file of a removed method.

    Args:
        what: the subject of the sentence: the place in the file and the name found there.
    """
    return (
        f"{what} belongs to a method that was removed. Learn new weights, or read it with the "
        f"commit that is tagged {LAST_WITH_IT!r}."
    )
