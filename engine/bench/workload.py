"""Seeded workloads: prompts and answer lengths, nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_ANSWER_TOKENS = 400
_FIRST_PLAIN_TOKEN = 1000  # below lie special tokens and single bytes


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and exactly how many tokens it answers."""

    token_ids: list[int]
    num_answer_tokens: int


def mixed_lengths(num_jobs: int, seed: int, vocab_size: int, max_prompt_tokens: int = 600) -> list[Job]:
    """One-token answers beside long ones, short prompts beside long ones.

    Answers are log-normal (median 45, clamped to 1 .. 400), prompts too (median 100, clamped to 16 ..
    max_prompt_tokens): like what a hub sees, most are short and some are very long. Prompts share no prefix.
    """
    rng = random.Random(seed)
    jobs = []
    for _ in range(num_jobs):
        num_prompt = int(min(max_prompt_tokens, max(16, rng.lognormvariate(4.6, 0.8))))
        num_answer = int(min(MAX_ANSWER_TOKENS, max(1, rng.lognormvariate(3.8, 1.2))))
        low = min(_FIRST_PLAIN_TOKEN, vocab_size // 2)
        jobs.append(Job([rng.randrange(low, vocab_size) for _ in range(num_prompt)], num_answer))
    return jobs
