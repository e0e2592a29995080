"""How many examples a property test tries: as many as it says, ten times as many in `make full`."""

from hypothesis import settings

_USUAL = 100  # hypothesis' own default; the profile `full` has ten times that (tests/conftest.py)


def examples(num: int) -> int:
    """For `settings(max_examples=...)`, which beats the profile: scaled as the profile scales the default."""
    return num * settings().max_examples // _USUAL
