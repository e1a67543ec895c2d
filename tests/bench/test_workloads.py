"""The draws of the workloads are fixed: figures of other engines were taken with the same ones."""

from __future__ import annotations

from cutaway.bench import workloads


def test_w1_has_its_published_totals() -> None:
    prompts, outputs = workloads.w1()
    assert (len(prompts), sum(map(len, prompts)), sum(outputs)) == (256, 142_827, 133_966)
    assert prompts[0][:4] == [6311, 6890, 663, 4242]
    assert (len(prompts[0]), len(prompts[255]), outputs[0], outputs[255]) == (964, 251, 845, 312)
    few, short = workloads.w1(32)
    assert few == prompts[:32]
    assert short == outputs[:32]
    assert workloads.w7() == (prompts, outputs)


def test_shapes_and_seeds_of_the_others() -> None:
    assert [len(p) for p in workloads.w2(0)] == [128]
    assert workloads.w2(3) == workloads.w2(3) != workloads.w2(4)
    assert [len(p) for p in workloads.w3(1)] == [512] * 64
    assert [len(p) for p in workloads.w4(0)] == [8192]
    assert workloads.w6(3) == [[1, 2]] * 3
    (repetitive,) = workloads.w2_repetitive(0)
    assert len(repetitive) == 128
    assert repetitive[:16] * 8 == repetitive


def test_w5_shares_its_prefix_and_nothing_else() -> None:
    first, second = workloads.w5(0, 1, requests=2)
    assert len(first) == len(second) == 2112
    assert first[:2048] == second[:2048] == workloads.w5(0, 2, requests=1)[0][:2048]
    assert first[2048:] != second[2048:]


def test_w8_arrives_at_its_rate() -> None:
    arrivals = workloads.w8(4.0, 400)
    times = [t for t, _ in arrivals]
    assert times == sorted(times)
    assert 80 < times[-1] < 125
    assert all(len(prompt) == 512 for _, prompt in arrivals)


def test_ids_stay_under_the_highest() -> None:
    prompts = workloads.prompts(1, 4, 500, highest=9)
    assert {i for p in prompts for i in p} == set(range(10))
    assert prompts[0] != prompts[1]
    assert prompts != workloads.prompts(2, 4, 500, highest=9)
