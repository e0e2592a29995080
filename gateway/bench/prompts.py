"""Prompts that no prefix cache has seen: each one is drawn anew, and no two begin alike.

Made of short English words, each of which is one token to the usual tokenizers, so that lengths can be asked for
without knowing which of them the server has.
"""

from __future__ import annotations

import random

# fmt: off
_WORDS = (
    "apple", "bird", "boat", "bread", "bridge", "castle", "chair", "cloud", "corn", "dance", "desk", "dream", "earth",
    "east", "fire", "fish", "floor", "forest", "garden", "gold", "grass", "green", "horse", "ice", "iron", "island",
    "key", "king", "lake", "lamp", "land", "leaf", "letter", "light", "lion", "map", "milk", "mirror", "moon", "music",
    "north", "ocean", "paper", "pen", "queen", "rain", "river", "road", "rock", "rose", "salt", "sand", "sea", "ship",
    "silver", "sky", "snow", "song", "south", "star", "stone", "storm", "sugar", "summer", "sun", "table", "tea",
    "tower", "train", "tree", "valley", "wall", "west", "wheel", "wind", "window", "winter", "wood",
)
# fmt: on


class Prompts:
    """Draws them, and whatever else of a load should not be the same each time.

    Args:
        seed: None is another one each time, for servers that may remember the last time.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def of(self, num_words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=num_words))

    def about(self, number: int, spread: float = 0.2) -> int:
        """A length near this one: equal requests would all end in the same step, again and again."""
        return max(1, round(self.within(number * (1 - spread), number * (1 + spread))))

    def within(self, least: float, most: float) -> float:
        return self._random.uniform(least, most)
