"""The sampler against a straightforward oracle that takes one row at a time, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cutaway.backends.torch import sampler
from cutaway.backends.torch.sampler import keep, noise, penalize, sample
from cutaway.core.request import SamplingParams
from sampling import build, oracle_kept, oracle_penalties, random_params

INF = float("inf")


@pytest.mark.parametrize("vocabulary", [40, 700, 20_011])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_mixed_rows_equal_the_oracle_row_by_row(vocabulary, spread):
    rng = np.random.default_rng(vocabulary)
    for trial in range(25):
        n = int(rng.integers(1, 9))
        logits = (rng.standard_normal((n, vocabulary)) * spread).astype(np.float32)
        params = [random_params(rng, int(rng.integers(2**62))) for _ in range(n)]
        prompts = [rng.integers(0, vocabulary, rng.integers(1, 30)).tolist() for _ in range(n)]
        answers = [rng.integers(0, min(vocabulary, 9), rng.integers(0, 12)).tolist() for _ in range(n)]
        histories = list(zip(prompts, answers, strict=True))
        positions = [len(p) + len(a) for p, a in histories]
        given = torch.from_numpy(logits.copy())
        got = sample(given, build(params, positions, histories))
        assert (given.numpy() == logits).all()  # read, not written
        assert not got.bad.any()
        for row, p in enumerate(params):
            final = oracle_penalties(logits[row], p, *histories[row])
            if p.greedy:
                assert final.max() - final[got.ids[row]] < 1e-5
            else:
                scaled = final / p.temperature
                kept, unsure = oracle_kept(scaled, p)
                gumbel = noise(torch.tensor([p.seed]), torch.tensor([positions[row]]), vocabulary)[0].numpy()
                allowed = sorted(kept | unsure)
                score = scaled[allowed] + gumbel[allowed]
                sure = max(s for t, s in zip(allowed, score, strict=True) if t not in unsure or scaled[t] == scaled.max())
                winners = {t for t, s in zip(allowed, score, strict=True) if s > sure - 1e-4}
                assert int(got.ids[row]) in winners, (trial, row, p)
            if p.logprobs is not None:
                raw = logits[row].astype(np.float64)
                logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
                assert got.logprobs.chosen[row] == pytest.approx(logprobs[got.ids[row]], abs=1e-4)
                best = np.argsort(-raw, kind="stable")[: p.logprobs]
                assert got.logprobs.top_ids[row, : p.logprobs].tolist() == best.tolist()
                assert got.logprobs.top[row, : p.logprobs].numpy() == pytest.approx(logprobs[best], abs=1e-4)
            elif got.logprobs is not None:
                assert got.logprobs.chosen[row].isnan() and got.logprobs.top[row].isnan().all()


# Greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_takes_the_lowest_of_equal_ids(dtype, rows):
    torch.set_num_threads(2)
    logits = torch.randn(rows, 50_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for ids in ([49_999, 17, 30_000], [5, 4], [49_998, 49_999], [0, 49_999]):
        tied = logits.clone()
        tied[:, ids] = 60.0
        got = sample(tied, build([SamplingParams(temperature=0)] * rows))
        assert got.ids.tolist() == [min(ids)] * rows
        assert got.ids.dtype == torch.int64 and not got.bad.any() and got.logprobs is None


def test_an_all_greedy_batch_is_one_pass_over_the_logits():
    class Count(TorchDispatchMode):
        wide = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.wide += any(isinstance(a, torch.Tensor) and a.numel() >= 4 * 5000 for a in args)
            return func(*args, **(kwargs or {}))

    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3))
    rows = build([SamplingParams(temperature=0)] * 4)
    with Count() as count:
        sample(logits, rows)
    assert count.wide == 2  # argmax, and the gather of one logit a row


def test_a_temperature_too_small_to_divide_by_is_greedy():
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(4))
    rows = build([SamplingParams(temperature=1e-40, seed=1), SamplingParams(temperature=1e-5, seed=1)])
    assert rows.temperature.tolist() == [0.0, pytest.approx(1e-5)]
    got = sample(logits, rows)
    assert got.ids.tolist() == logits.argmax(-1).tolist() and not got.bad.any()


# Rows and their neighbours


@pytest.mark.parametrize("vocabulary", [333, 9001])
def test_a_row_s_token_does_not_depend_on_its_neighbours(vocabulary):
    rng = np.random.default_rng(5)
    n = 24
    logits = torch.from_numpy((rng.standard_normal((n, vocabulary)) * 2).astype(np.float32))
    params = [random_params(rng, int(rng.integers(-(2**63), 2**63))) for _ in range(n)]
    histories = [(rng.integers(0, vocabulary, 9).tolist(), rng.integers(0, vocabulary, i).tolist()) for i in range(n)]
    positions = [9 + i for i in range(n)]

    def ids(chosen):
        got = sample(
            logits[chosen], build([params[i] for i in chosen], [positions[i] for i in chosen], [histories[i] for i in chosen])
        )
        return dict(zip(chosen, got.ids.tolist(), strict=True))

    whole = ids(list(range(n)))
    assert len(set(whole.values())) > n // 2
    for i in range(n):
        assert ids([i]) == {i: whole[i]}
    for size in (2, 7, n):
        chosen = [int(i) for i in rng.permutation(n)[:size]]
        assert ids(chosen) == {i: whole[i] for i in chosen}


def test_equal_seeds_and_positions_give_equal_tokens_and_others_do_not():
    logits = torch.zeros(1, 5000).expand(4, -1)
    params = [SamplingParams(seed=s) for s in (3, 3, 4, 3)]
    first = sample(logits, build(params, [8, 8, 8, 9])).ids.tolist()
    assert first[0] == first[1] and len(set(first)) == 3
    assert first == sample(logits, build(params, [8, 8, 8, 9])).ids.tolist()


def test_seeds_take_all_64_bits():
    params = [SamplingParams(seed=s) for s in (-1, 2**64 - 1, 2**63, -(2**63), 0)]
    ids = sample(torch.zeros(5, 50_000), build(params)).ids.tolist()
    assert ids[0] == ids[1] and ids[2] == ids[3] and len(set(ids)) == 3


def test_rows_move_on_by_their_positions():
    rows = build([SamplingParams(seed=3)], [8])
    logits = torch.zeros(1, 5000)
    assert sample(logits, rows.at([9])).ids == sample(logits, build([SamplingParams(seed=3)], [9])).ids
    assert sample(logits, rows.at(torch.tensor([8]))).ids == sample(logits, rows).ids


# Filters


def survivors(logits, **settings):
    kept = keep(torch.tensor([logits], dtype=torch.float32), build([SamplingParams(seed=0, **settings)]))
    return kept[0].isfinite().nonzero().flatten().tolist()


LOGITS = np.log([0.4, 0.05, 0.3, 0.1, 0.15]).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 2, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 500}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.41}, [0, 2]),
        ({"top_p": 0.71}, [0, 2, 4]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.249}, [0, 2, 3, 4]),
        ({"min_p": 0.26}, [0, 2, 4]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.56}, [0]),  # of what top-k left, the first has 4/7 = 0.571
        ({"top_k": 2, "top_p": 0.58}, [0, 2]),
        ({"top_p": 0.84, "min_p": 0.5}, [0, 2]),
    ],
)
def test_what_the_filters_keep(settings, expected):
    assert survivors(LOGITS, **settings) == expected


def test_tokens_of_equal_logit_stand_or_fall_together():
    tied = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0]
    assert survivors(tied, top_k=2) == [1, 2, 3, 4]
    assert survivors(tied, top_p=0.6) == [1, 2, 3, 4]
    assert survivors([0.0] * 70, top_k=3) == list(range(70))
    # also where the candidates end among the equal ones
    ids = {int(sample(torch.zeros(1, 20_000), build([SamplingParams(seed=s, top_k=4)])).ids) for s in range(40)}
    assert len(ids) == 40


@pytest.mark.parametrize("settings", [{"top_k": 40}, {"top_k": 3000}, {"top_p": 0.5}, {"top_p": 0.99}, {"min_p": 0.01},
                                      {"top_k": 100, "top_p": 0.9}, {"top_p": 0.3, "min_p": 0.2}], ids=str)  # fmt: skip
@pytest.mark.parametrize("rounded", [False, True])
def test_candidates_give_what_the_whole_vocabulary_gives(settings, rounded):
    n, vocabulary = 12, 20_100
    for trial in range(4):
        logits = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(trial)) * (trial + 1)
        if rounded:  # many equal logits, as a bfloat16 head gives
            logits = logits.bfloat16().float()
        params = [SamplingParams(seed=100 * trial + i, temperature=0.7, **settings) for i in range(n)]
        rows = build(params, list(range(n)))
        scaled = (logits - logits.amax(-1, keepdim=True)) / 0.7
        whole = (keep(scaled, rows) + noise(rows.seeds, rows.positions, vocabulary)).argmax(-1)
        assert torch.equal(sample(logits, rows).ids, whole)


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 4095, 4096, 10_007])
def test_the_largest_are_found_by_their_blocks(vocabulary):
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    for n in {0, 1, min(20, vocabulary), min(vocabulary, 300)}:
        values, ids = sampler._largest(logits, n)
        assert torch.equal(values, logits.topk(n).values)
        assert torch.equal(logits.gather(1, ids), values)


# Penalties


def test_penalties_tell_prompt_from_answer_and_see_the_last_token():
    logits = torch.tensor([[1.0, -1.0, 2.0, -2.0, 0.5, 3.0]])
    p = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    out = penalize(logits, build([p], [5], [([0, 1, 1], [2, 3, 2])]))
    assert out.tolist() == [[0.5, -2.0, 2 / 2 - 0.5 - 0.5, -2 * 2 - 0.5 - 0.25, 0.5, 3.0]]
    assert logits.tolist() == [[1.0, -1.0, 2.0, -2.0, 0.5, 3.0]]
    # a token that occurs in both is one token to the repetition penalty
    assert penalize(logits, build([p], [4], [([2, 4], [2])])).tolist() == [[1.0, -1.0, 1 - 0.75, -2.0, 0.25, 3.0]]
    # the first step: no answer yet
    assert penalize(logits, build([p], [2], [([5, 5], [])])).tolist() == [[1.0, -1.0, 2.0, -2.0, 0.5, 1.5]]


def test_ragged_histories_and_rows_without_penalties():
    logits = torch.ones(3, 8)
    off, on = SamplingParams(temperature=0), SamplingParams(temperature=0, presence_penalty=1.0, repetition_penalty=2.0)
    out = penalize(logits, build([on, off, on], [9, 9, 9], [([0], [1, 2, 3, 4, 5]), ([1], [1] * 3), ([7], [6])]))
    assert out.tolist() == [[0.5, -0.5, -0.5, -0.5, -0.5, -0.5, 1, 1], [1] * 8, [1, 1, 1, 1, 1, 1, -0.5, 0.5]]
    rows = build([off] * 3)
    assert penalize(logits, rows) is logits


def test_penalties_move_the_argmax():
    logits = torch.tensor([[2.0, 1.9, 0.0]]).expand(2, -1)
    p = [SamplingParams(temperature=0, frequency_penalty=f) for f in (0.0, 0.5)]
    assert sample(logits, build(p, [2, 2], [([2], [0]), ([2], [0])])).ids.tolist() == [0, 1]


# Masks, bad rows, log-probabilities


def bits(allowed, vocabulary):
    words = np.zeros((len(allowed), -(-vocabulary // 32)), np.uint32)
    for row, ids in enumerate(allowed):
        for i in ids:
            words[row, i // 32] |= np.uint32(1 << (i % 32))
    return torch.from_numpy(words)


@pytest.mark.parametrize("vocabulary", [31, 32, 100])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3}, {"seed": 1, "top_p": 0.4}], ids=str
)
def test_only_allowed_tokens_are_drawn(vocabulary, settings):
    allowed = [[0], [30], [vocabulary - 1, 3], list(range(vocabulary)), [5, 6, 7]] * 20
    logits = torch.randn(100, vocabulary, generator=torch.Generator().manual_seed(1))
    got = sample(logits, build([SamplingParams(**settings)] * 100, list(range(100))), bits(allowed, vocabulary))
    assert all(int(i) in a for i, a in zip(got.ids, allowed, strict=True))
    assert not got.bad.any()
    if settings == {"temperature": 0}:
        assert all(int(i) == max(a, key=lambda t: logits[r, t]) for r, (i, a) in enumerate(zip(got.ids, allowed, strict=True)))


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3}, {"seed": 1, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("masked", [False, True])
def test_bad_rows_are_named_and_the_others_go_on(settings, masked):
    vocabulary = 20_000
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    mask = torch.full((6, vocabulary // 32), -1, dtype=torch.int32) if masked else None
    rows = build([SamplingParams(**settings)] * 6, [4] * 6)
    good = sample(logits, rows, mask).ids
    spoilt = logits.clone()
    spoilt[1, 7] = float("nan")
    spoilt[2, 19_999] = INF
    spoilt[3, :] = -INF
    spoilt[4, : vocabulary // 2] = torch.where(torch.arange(vocabulary // 2) == good[4], spoilt[4, : vocabulary // 2], -INF)
    got = sample(spoilt, rows, mask)
    assert got.bad.tolist() == [False, True, True, True, False, False]
    assert got.ids[[0, 5]].tolist() == good[[0, 5]].tolist()
    assert ((got.ids >= 0) & (got.ids < vocabulary)).all()


def test_a_mask_that_allows_nothing_and_a_nan_under_the_mask_are_bad():
    logits = torch.zeros(3, 64)
    logits[1, 9] = float("nan")
    mask = bits([[], [1, 2], [1, 2]], 64)
    assert sample(logits, build([SamplingParams(temperature=0)] * 3), mask).bad.tolist() == [True, True, False]


def test_logprobs_are_of_the_raw_logits():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    p = [
        SamplingParams(temperature=0.2, seed=1, logprobs=4, top_k=2, repetition_penalty=1.9, frequency_penalty=2.0),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=0),
    ]
    got = sample(logits, build(p, [3] * 3, [([1, 2], [int(logits[0].argmax())])] * 3), bits([range(0, 500, 7)] * 3, 500))
    raw = logits.log_softmax(-1)
    for row in (0, 2):
        assert got.logprobs.chosen[row] == pytest.approx(float(raw[row, got.ids[row]]), abs=1e-5)
        assert got.logprobs.chosen[row] < 0
    assert got.logprobs.chosen[1].isnan()
    assert got.logprobs.top_ids[0].tolist() == raw[0].topk(4).indices.tolist()
    assert torch.allclose(got.logprobs.top[0], raw[0].topk(4).values, atol=1e-5)
    assert got.logprobs.top.shape == (3, 4) and got.logprobs.top[1].isnan().all()


def test_equal_logprobs_come_in_order_of_their_ids():
    logits = torch.zeros(1, 9000)
    logits[0, [8000, 5, 700]] = 4.0
    got = sample(logits, build([SamplingParams(temperature=0, logprobs=3)]))
    assert got.logprobs.top_ids.tolist() == [[5, 700, 8000]]
    assert got.ids.tolist() == [5]


def test_more_logprobs_than_tokens():
    got = sample(torch.tensor([[0.0, 1.0]]), build([SamplingParams(temperature=0, logprobs=5)]))
    assert got.logprobs.top_ids[0, :2].tolist() == [1, 0]
    assert got.logprobs.top[0, 2:].isnan().all()


# What cannot be built


def test_a_sampled_row_without_a_seed_and_a_penalty_without_history_are_named():
    with pytest.raises(ValueError, match="row 1 is sampled and has no seed"):
        build([SamplingParams(temperature=0), SamplingParams()])
    with pytest.raises(ValueError, match="row 1 is penalized"):
        build([SamplingParams(temperature=0), SamplingParams(temperature=0, presence_penalty=1.0)])


def test_no_rows():
    got = sample(torch.zeros(0, 40), build([]))
    assert got.ids.shape == got.bad.shape == (0,)
