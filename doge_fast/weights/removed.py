"""What earlier versions wrote into checkpoints and weights.json, and this one refuses to read."""

LAST_WITH_IT = "before-the-card"
"""The git tag of the last commit that has all of it."""


def refusal(what: str) -> str:
    """The sentences that refuse a file because of what is removed.

    Args:
        what: the subject, up to a verb: where it was found and its name.
    """
    return (
        f"{what} belongs to a method that was removed. Learn new weights, or read it with the "
        f"commit that is tagged {LAST_WITH_IT!r}."
    )
