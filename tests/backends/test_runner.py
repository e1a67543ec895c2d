"""The torch backend behind the seam: one step is one path, whatever rows it mixes; ids and logits say so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from cutaway.core.plan import LateInputs
from cutaway.core.request import SamplingParams
from plans import GREEDY, OTHERS, PROMPT, Seen, alone
from sampling import oracle_penalties

CLOSE = {"rtol": 0, "atol": 2e-4}


@pytest.fixture(autouse=True)
def inference():
    """Tests write into the pool and the weights, which are inference tensors."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture
def seen(folder):
    return Seen(folder)


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize("chunk", [1, 5, 16, 17])
def test_chunks_are_as_good_as_the_whole(tmp_path, name, chunk):
    folder = tiny.write_folder(tmp_path / name, name)
    ids, logits = alone(folder, PROMPT, 6)
    seen = Seen(folder)
    hand = seen.hand()
    assert hand.generate(hand.admit(PROMPT), 6, chunk=chunk) == ids
    np.testing.assert_allclose(seen.logits[-1], logits, **CLOSE)


def test_a_mixed_step_is_as_good_as_one_row_alone(folder, seen):
    """Decode rows, a prompt, chunks that sample and chunks that do not, all in one step, in any order."""
    expected = [alone(folder, prompt, 8)[0] for prompt in [*OTHERS, PROMPT]]
    hand = seen.hand()
    rows = [hand.admit(prompt) for prompt in OTHERS]
    for row in rows[:3]:
        hand.step((row, row.pending))
    late = hand.admit(PROMPT)
    hand.step((rows[3], 20), (rows[0], 1), (late, 16), (rows[4], 40), (rows[1], 1))
    assert hand.result.token_offsets.tolist() == [0, 0, 1, 1, 2, 3]
    hand.step((late, 30), (rows[3], 11), (rows[2], 1), (rows[4], 1))
    for row in (*rows, late):
        hand.generate(row, 8 - (len(row.tokens) - row.num_prompt))
    assert [row.tokens[row.num_prompt :] for row in (*rows, late)] == expected


def test_rows_decode_together_as_they_do_alone(folder, seen):
    expected = [alone(folder, prompt, 20)[0] for prompt in OTHERS]
    hand = seen.hand()
    rows = [hand.admit(prompt) for prompt in OTHERS]
    hand.step(*((row, row.pending) for row in rows))
    for _ in range(19):
        hand.step(*((row, 1) for row in reversed(rows)))
    assert [row.tokens[row.num_prompt :] for row in rows] == expected


def test_result_columns_follow_the_plan(seen):
    hand = seen.hand()
    rows = [hand.admit(OTHERS[i], slot=slot) for i, slot in ((4, 9), (1, 0), (3, 4))]
    hand.step((rows[0], 10), (rows[1], 16), (rows[2], 31))
    result = hand.result
    assert result.slot.tolist() == [9, 0, 4] and result.generation.tolist() == [7, 7, 7]
    assert result.token_offsets.tolist() == [0, 0, 1, 2] and result.token_ids.dtype == np.int32
    assert result.n_accepted.tolist() == [0, 0, 0] and result.bad.tolist() == [False] * 3 and result.logprobs is None


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_a_cached_prefix_is_as_good_as_a_fresh_one(folder, seen, shared):
    ids, logits = alone(folder, PROMPT, 10)
    hand = seen.hand()
    first = hand.admit([*PROMPT[: shared * 16], 5, 6, 7])
    hand.generate(first, 2)
    second = hand.admit(PROMPT, blocks=first.blocks[:shared])
    assert hand.generate(second, 10) == ids
    np.testing.assert_allclose(seen.logits[-1], logits, **CLOSE)
    hand.generate(first, 3)  # and its first owner goes on


def test_a_copied_block_is_as_good_as_its_source(folder, seen):
    ids, _ = alone(folder, PROMPT, 10)
    hand = seen.hand()
    first = hand.admit(PROMPT)
    hand.step((first, 48))
    second = hand.admit(PROMPT, blocks=first.blocks[:3])
    target = hand.free.pop(0)
    copies = [(second.blocks[1], target)]
    second.blocks[1] = target
    hand.step((second, 5), copies=copies)
    assert second.tokens[53:] + hand.generate(second, 9) == ids
    assert hand.generate(first, 10) == ids


def test_a_remapped_block_is_read_from_its_new_place(folder, seen):
    ids, _ = alone(folder, PROMPT, 10)
    hand = seen.hand()
    twin, row = hand.admit(PROMPT), hand.admit(PROMPT)
    hand.step((twin, 48), (row, 48))
    seen.backend.cache.clear(np.array(row.blocks[:2]))  # would be seen if it were still read
    row.blocks[:2], row.sent = twin.blocks[:2], 0
    assert hand.generate(row, 10) == ids


def test_reused_slots_and_blocks_hold_nothing_of_their_last_owner(folder, seen):
    expected = [alone(folder, prompt, 6)[0] for prompt in OTHERS]
    hand = seen.hand()
    seen.backend.cache.pool.fill_(float("nan"))  # the worst that a request can leave behind
    for _ in range(2):
        for prompt, ids in zip(OTHERS, expected, strict=True):
            row = hand.admit(prompt, slot=3)
            assert hand.generate(row, 6, chunk=7) == ids
            hand.release(row)


def test_a_row_writes_to_its_own_blocks_alone(seen):
    hand = seen.hand()
    pool = seen.backend.cache.pool
    pool.normal_(generator=torch.Generator().manual_seed(0))
    before = pool.clone()
    rows = [hand.admit(prompt) for prompt in OTHERS]
    for row in rows:
        hand.generate(row, 5, chunk=6)
    own = {block for row in rows for block in row.blocks}
    others = [block for block in range(pool.shape[2]) if block not in own]
    assert 0 in others
    assert torch.equal(pool[:, :, others], before[:, :, others])


def test_blocks_go_out_and_come_back_elsewhere(folder, seen):
    ids, _ = alone(folder, PROMPT, 10)
    hand = seen.hand()
    row = hand.admit(PROMPT)
    start = hand.generate(row, 3)
    blocks = seen.backend.export_blocks(row.blocks)
    other = Seen(folder)
    there = other.hand(seed=5)
    places = [there.free.pop(0) for _ in row.blocks]
    other.backend.import_blocks(places, blocks)
    moved = there.admit(row.tokens)
    moved.blocks, moved.computed, moved.num_prompt = places, row.computed, row.num_prompt
    assert start + there.generate(moved, 7) == ids


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, seed=11), SamplingParams(temperature=0.8, top_p=0.9, seed=3)]
)
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_stand_while_they_equal_the_targets_own_samples(folder, seen, params, right):
    ids, _ = alone(folder, PROMPT, 12, params)
    hand = seen.hand()
    row, neighbour = hand.admit(PROMPT, params), hand.admit(OTHERS[2])
    hand.step((row, 53), (neighbour, 17))
    drafts = [t if i < right else (t + 1) % 384 for i, t in enumerate(ids[1:4])]
    answer = hand.step((neighbour, 1), (row, 1, drafts))
    assert answer[row] == ids[1 : right + 2] and hand.result.n_accepted.tolist() == [0, right]
    assert hand.result.token_offsets.tolist() == [0, 1, right + 2]
    answer = hand.step((row, 1, [ids[right + 2], ids[right + 3] + 1]))
    assert answer[row] == ids[right + 2 : right + 4]
    hand.generate(row, 12 - (len(row.tokens) - 53))
    assert row.tokens[53:] == ids


def test_drafts_of_several_rows(folder, seen):
    expected = [alone(folder, prompt, 8)[0] for prompt in OTHERS[:4]]
    hand = seen.hand()
    rows = [hand.admit(prompt) for prompt in OTHERS[:4]]
    hand.step(*((row, row.pending) for row in rows))
    wrong = [(t + 1) % 384 for t in expected[1][1:]]
    hand.step((rows[0], 1, expected[0][1:4]), (rows[1], 1, wrong[:3]), (rows[2], 1), (rows[3], 1, [expected[3][1], 0, 0, 0]))
    assert hand.result.n_accepted.tolist() == [3, 0, 0, 1]
    assert hand.result.token_offsets.tolist() == [0, 4, 5, 6, 8]
    for row, ids in zip(rows, expected, strict=True):
        hand.generate(row, 8 - (len(row.tokens) - row.num_prompt))
        assert row.tokens[row.num_prompt :] == ids


def test_late_masks(seen):
    hand = seen.hand()
    rows = [hand.admit(PROMPT), hand.admit(OTHERS[1]), hand.admit(OTHERS[3])]
    masks = np.zeros((3, 12), np.uint32)
    masks[0, 2] = 1 << 7 | 1 << 30  # 71 and 94
    masks[1] = 0xFFFFFFFF
    masks[2, 11] = 1 << 31  # 383
    ids = hand.step((rows[0], 53), (rows[1], 10), (rows[2], 31), late=LateInputs(masks=masks))
    assert ids[rows[0]] == [71 if seen.logits[0][71] >= seen.logits[0][94] else 94]
    assert ids[rows[1]] == [] and ids[rows[2]] == [383]


def test_late_drafts(folder, seen):
    ids, _ = alone(folder, PROMPT, 6)
    hand = seen.hand()
    row = hand.admit(PROMPT)
    hand.step((row, 53))
    drafts = np.array([ids[1], ids[2] + 1], np.int32)
    assert hand.step((row, 1, drafts.tolist()), late=LateInputs(token_ids=drafts))[row] == ids[1:3]
    assert hand.generate(row, 3) == ids[3:]


def test_late_inputs_come_before_anything_else(seen):
    hand = seen.hand()
    row = hand.admit(PROMPT)
    ticket = seen.backend.submit(hand.plan((row, 53), late=True))
    with pytest.raises(RuntimeError, match="step 1 still waits"):
        seen.backend.collect(ticket)
    with pytest.raises(RuntimeError, match="step 1 still waits"):
        seen.backend.submit(hand.plan((hand.admit(OTHERS[0]), 1)))
    seen.backend.late(ticket, LateInputs())
    assert len(seen.backend.collect(ticket).token_ids) == 1
    with pytest.raises(RuntimeError, match="does not wait"):
        seen.backend.late(ticket, LateInputs())


def test_two_plans_in_flight(folder, seen):
    """The second plan's row continues with a token that the host has not seen yet."""
    ids, _ = alone(folder, PROMPT, 3)
    hand = seen.hand()
    row = hand.admit(PROMPT)
    first = seen.backend.submit(hand.plan((row, 53)))
    row.computed += 53
    row.tokens.append(-1)
    second = seen.backend.submit(hand.plan((row, 1)))
    assert seen.backend.collect(first).token_ids.tolist() == ids[:1]
    assert seen.backend.collect(second).token_ids.tolist() == ids[1:2]


def test_logprobs_are_of_the_raw_logits(seen):
    hand = seen.hand()
    scored = SamplingParams(temperature=0.7, seed=5, logprobs=3, repetition_penalty=1.3)
    rows = [hand.admit(PROMPT), hand.admit(OTHERS[2], scored), hand.admit(OTHERS[3], SamplingParams(temperature=0, logprobs=0))]
    hand.step((rows[0], 20), (rows[1], 17), (rows[2], 31))
    hand.step((rows[0], 33), (rows[1], 1), (rows[2], 1))
    scores, result = hand.result.logprobs, hand.result
    expected = torch.from_numpy(seen.logits).log_softmax(-1).numpy()
    assert scores.top.shape == (3, 3) and scores.top_ids.dtype == np.int32
    assert np.isnan(scores.chosen[0]) and np.isnan(scores.top[0]).all()
    for row in (1, 2):
        assert scores.chosen[row] == pytest.approx(expected[row][result.token_ids[row]], abs=1e-4)
    assert scores.top_ids[1].tolist() == np.argsort(-expected[1])[:3].tolist()
    np.testing.assert_allclose(scores.top[1], np.sort(expected[1])[::-1][:3], atol=1e-4)


def test_logprobs_of_drafts_are_those_of_what_was_emitted(folder, seen):
    params = SamplingParams(temperature=0, logprobs=1)
    ids, _ = alone(folder, PROMPT, 4, params)
    hand = seen.hand()
    row = hand.admit(PROMPT, params)
    hand.step((row, 53))
    hand.step((row, 1, [ids[1], ids[2] + 1, 0]))
    assert hand.result.token_ids.tolist() == ids[1:3]
    expected = torch.from_numpy(seen.logits).log_softmax(-1).numpy()
    np.testing.assert_allclose(hand.result.logprobs.chosen, [expected[0][ids[1]], expected[1][ids[2]]], atol=1e-4)


def test_penalties_see_every_token_up_to_the_last(seen):
    penalized = SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.5)
    hand = seen.hand()
    row, plain = hand.admit(PROMPT, penalized), hand.admit(OTHERS[3])
    hand.step((row, 53), (plain, 31))
    for _ in range(15):
        before = row.tokens[53:]
        ids = hand.step((plain, 1), (row, 1))
        assert ids[row][0] == oracle_penalties(seen.logits[1], penalized, PROMPT, before).argmax()
        assert ids[plain][0] == seen.logits[0].argmax()


def test_seeded_rows_do_not_depend_on_neighbours(folder, seen):
    params = SamplingParams(temperature=1.0, seed=1234)
    ids, _ = alone(folder, PROMPT, 12, params)
    hand = seen.hand()
    rows = [hand.admit(p, SamplingParams(temperature=1.0, seed=i)) for i, p in enumerate(OTHERS)]
    hand.step(*((row, row.pending) for row in rows))
    row = hand.admit(PROMPT, params, slot=11)
    for i in range(60):
        if row.num_prompt + 12 == len(row.tokens):
            break
        hand.step(*((r, 1) for r in rows[: i % 5]), (row, min(9, row.pending)), *((r, 1) for r in rows[i % 5 :]))
    assert row.tokens[53:] == ids


def test_a_bad_row_is_bad_alone(folder, seen):
    expected, _ = alone(folder, OTHERS[3], 5)
    hand = seen.hand()
    seen.backend.model.embedding.weight[380] = float("nan")
    good, bad = hand.admit(OTHERS[3]), hand.admit([4, 5, 380, 6])
    hand.step((good, 31), (bad, 4))
    assert hand.result.bad.tolist() == [False, True]
    hand.release(bad)  # its blocks are the next ones taken
    again = hand.admit(OTHERS[3])
    hand.step((again, 31), (good, 1))
    assert hand.result.bad.tolist() == [False, False]
    hand.generate(good, 3)
    hand.generate(again, 4)
    assert good.tokens[31:] == expected and again.tokens[31:] == expected


def test_bf16_is_close_to_fp32(folder):
    _, exact = alone(folder, PROMPT, 1)
    _, half = alone(folder, PROMPT, 1, dtype="bf16")
    assert 0 < np.abs(half - exact).max() < 0.05 * np.abs(exact).max()


def test_half_precision_is_what_auto_means(folder):
    seen = Seen(folder, dtype="auto")
    assert seen.backend.info()["dtype"] == "bfloat16"
    assert seen.backend.kv().bytes_per_block == 2 * 2 * 2 * 16 * 16 * 2
