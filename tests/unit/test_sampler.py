"""The sampler: each row's token depends on its own logits, parameters and random key only."""

import math
import time

import pytest
import torch

from engine.sample.penalties import RowHistory, needs_history
from engine.sample.random import philox, uniform
from engine.sample.sampler import RowSampling, Sampler
from engine.sampling_params import SamplingParams

EOS = 3


def row(prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), vocab: int = 1000, **params: object) -> RowSampling:
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 7, **params})  # type: ignore[arg-type]
    history = RowHistory.of(prompt, output, vocab) if needs_history(sampling) else None
    return RowSampling(sampling, 0, len(output), history)


def sample_one(logits: torch.Tensor, state: RowSampling, position: int = 0) -> int:
    return Sampler((EOS,)).sample(logits.unsqueeze(0), [state], [position])[0][0]


def frequencies(logits: torch.Tensor, num_draws: int, **params: object) -> torch.Tensor:
    state = row(vocab=logits.numel(), temperature=1.0, **params)
    rows = [state] * num_draws
    tokens = Sampler((EOS,)).sample(logits.expand(num_draws, -1), rows, range(num_draws))[0]
    return torch.bincount(torch.tensor(tokens), minlength=logits.numel()) / num_draws


def test_philox_gives_the_published_words() -> None:
    """Known answers for Philox4x32-10 from the authors' Random123 distribution."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_uniform_depends_on_seed_choice_and_position() -> None:
    draws = {uniform(seed, choice, position) for seed in range(5) for choice in range(5) for position in range(5)}

    assert len(draws) == 125
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_greedy_takes_the_likeliest_and_the_lowest_id_on_a_tie() -> None:
    logits = torch.zeros(1000)
    logits[[20, 10, 30]] = 5.0

    assert sample_one(logits, row()) == 10


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()

    chi_square = 20_000 * ((frequencies(logits, 20_000) - logits.exp()).square() / logits.exp()).sum()

    assert chi_square < 16.27  # 99.9 % quantile at 3 degrees of freedom


def test_draws_follow_the_distribution_over_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5000) * 3
    probs = logits.softmax(0)
    likely = probs > 0.005

    seen = frequencies(logits, 20_000)

    torch.testing.assert_close(seen[likely], probs[likely], atol=0.006, rtol=0)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.75}, {1, 3, 2}),
        ({"min_p": 0.6}, {1, 3}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"top_p": 1e-6}, {1}),
    ],
    ids=str,
)
def test_cuts_keep_just_the_tokens_they_should(params: dict[str, float], kept: set[int]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()

    assert set(frequencies(logits, 2000, **params).nonzero().flatten().tolist()) == kept


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0], ids=["flat", "wide", "peaked"])
def test_top_p_over_a_large_vocabulary_equals_a_full_sort(scale: float, top_p: float) -> None:
    """Flat rows need more than the likeliest few; the kept set is the same as by sorting everything."""
    torch.manual_seed(1)
    logits = torch.randn(3000) * scale + torch.arange(3000) * 1e-4
    probs = logits.softmax(0)
    ordered, ids = probs.sort(descending=True)
    num_kept = int((ordered.double().cumsum(0) < top_p).sum()) + 1

    seen = frequencies(logits, 4000, top_p=top_p)

    assert seen[ids[num_kept + 2 :]].sum() == 0
    assert seen[ids[:num_kept]].sum() > 0.99


def test_a_row_draws_the_same_token_alone_and_beside_others() -> None:
    torch.manual_seed(2)
    logits = torch.randn(32, 3000) * 2
    kinds: list[dict[str, object]] = [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {"temperature": 0.0}]
    rows = [row(vocab=3000, **{"temperature": 0.8, "seed": i, **kinds[i % len(kinds)]}) for i in range(32)]
    together = Sampler((EOS,)).sample(logits, rows, range(32))[0]

    assert together == [sample_one(logits[i], rows[i], i) for i in range(32)]


def test_a_tiny_temperature_is_greedy_and_never_fails() -> None:
    torch.manual_seed(3)
    logits = torch.randn(1000) * 30

    for temperature in (1e-6, 1e-45, 1e-46, 5e-324):
        assert sample_one(logits, row(temperature=temperature)) == int(logits.argmax())


def test_penalties_match_their_formulas() -> None:
    logits = torch.zeros(1000)
    logits[5], logits[6], logits[7] = 2.0, 1.9, 1.5

    assert sample_one(logits, row(output=(5,), frequency_penalty=0.2)) == 6
    assert sample_one(logits, row(output=(5, 6, 6), frequency_penalty=0.3)) == 5
    assert sample_one(logits, row(output=(5, 6), presence_penalty=0.6)) == 7
    assert sample_one(logits, row(prompt=(5,), presence_penalty=0.6)) == 5, "presence counts the output only"
    assert sample_one(logits, row(prompt=(5,), repetition_penalty=1.1)) == 6, "repetition counts the prompt too"
    assert sample_one(-logits - 1, row(prompt=tuple(range(8, 1000)), repetition_penalty=9.0)) in range(8)


def test_bias_and_forbidden_tokens_cost_no_time_per_token() -> None:
    """All ids at once: a loop over them would hold up everybody in the step."""
    everything = dict.fromkeys(range(49152), 0.5)
    state = row(vocab=49152, logit_bias=everything, min_tokens=5, stop_token_ids=tuple(range(49000)))
    logits = torch.zeros(49152)
    logits[49100] = 1.0
    began = time.perf_counter()

    assert sample_one(logits, state) == 49100
    assert time.perf_counter() - began < 0.2


def test_logit_bias_forbids_and_forces() -> None:
    logits = torch.zeros(1000)
    logits[5] = 2.0

    assert sample_one(logits, row(logit_bias={5: -100.0})) == 0
    assert sample_one(logits, row(logit_bias={9: 100.0})) == 9


def test_end_tokens_cannot_come_before_min_tokens() -> None:
    logits = torch.zeros(1000)
    logits[EOS], logits[8], logits[9] = 3.0, 2.0, 1.0

    assert sample_one(logits, row(min_tokens=2, output=(1,), stop_token_ids=(8,))) == 9
    assert sample_one(logits, row(min_tokens=2, output=(1, 1), stop_token_ids=(8,))) == EOS


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    torch.manual_seed(4)
    logits = torch.randn(1000)
    state = row(num_logprobs=3, logit_bias={9: 100.0})
    expected = logits.log_softmax(0)

    [token], [logprobs] = Sampler((EOS,)).sample(logits.unsqueeze(0), [state], [0])

    assert token == 9
    assert logprobs is not None
    assert math.isclose(logprobs.logprob, float(expected[9]), abs_tol=1e-6)
    assert [token_id for token_id, _ in logprobs.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-6)


def test_no_logprobs_unless_asked_for() -> None:
    assert Sampler((EOS,)).sample(torch.zeros(1, 1000), [row()], [0])[1] == [None]
