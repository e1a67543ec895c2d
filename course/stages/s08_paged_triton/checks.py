"""Stage 08: the kernel against dense attention in float64, in Triton's interpreter or on a GPU, and what it does to memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from course.given.launches import Launches, read_rate
from course.given.paged import BytesMade, HostReads, Paged, paged, worst
from course.runner.checking import Lab, check
from course.runner.timing import seconds
from torch import Tensor

from cutaway.backends.torch.attention import paged_attention

SPOILT = "the answer is not a number: what lies past the context was loaded, or exp(-inf - -inf) was taken"
BASE_2 = "this is a softmax with base 2: exp2 needs log2(e) in the scale"
NO_KERNEL = "the answer is computed by torch: no Triton kernel was launched"


def decode(lab: Lab, case: Paged, num_splits: int | None = None) -> Tensor:
    """The answer to a case, watched."""
    with Launches() as seen:
        got = case.answer(lab, lambda: lab.app.paged_decode(*case.decode, scale=case.scale, num_splits=num_splits))
    lab.expect(seen.grids, NO_KERNEL)
    return got


def error(lab: Lab, case: Paged, num_splits: int | None = None) -> float:
    return worst((decode(lab, case, num_splits).double() - case.dense()).abs())


def likely(case: Paged, got: Tensor) -> str:
    """The mistake that a wrong answer itself shows, or ""."""
    if bool(got.isnan().any()):
        return SPOILT
    case.scale *= math.log(2.0)
    return BASE_2 if worst((got - case.dense()).abs()) < 1e-5 else ""


def equals_dense(
    lab: Lab, contexts: Sequence[int], heads: int = 4, kv_heads: int = 2, block_size: int = 16, dim: int = 16
) -> None:
    """Measures the largest error over rows of a call of their own."""
    errors: dict[int, float] = {}
    probably = ""
    for context in contexts:
        case = paged([(1, context)], heads=heads, kv_heads=kv_heads, block_size=block_size, dim=dim, device=lab.device)
        got = decode(lab, case, 1).double()
        errors[context] = worst((got - case.dense()).abs())
        if errors[context] > 1e-5 and not probably:
            probably = likely(case, got)
    longest = max(errors, key=lambda context: errors[context])
    lab.measure(
        errors[longest],
        probably=probably,
        detail=f"worst with a context of {longest}, {heads} heads on {kv_heads}, blocks of {block_size}",
    )


@check(
    gate="< 1e-5",
    needs="triton",
    probably="with one key its weight is 1, and the answer is its value: the running sum or maximum begins wrong",
)
def one_token(lab: Lab) -> None:
    """error to dense, a context of one token"""
    equals_dense(lab, [1], kv_heads=4)


@check(
    gate="< 1e-5",
    needs="triton",
    probably="a tile reaches past the context: keys there need a score of -inf, 0 is a score like any other",
)
def shorter_than_a_tile(lab: Lab) -> None:
    """error to dense, 2, 7 and 15 tokens"""
    equals_dense(lab, [2, 7, 15])


@check(
    gate="< 1e-5",
    needs="triton",
    probably="a block is looked up with the token's offset, or by a number that is rounded wrong at its end",
)
def around_a_block(lab: Lab) -> None:
    """error to dense, 16, 17, 32, 33 tokens"""
    equals_dense(lab, [16, 17, 32, 33])


@check(
    gate="< 1e-5",
    needs="triton",
    probably="the last tile is masked by context % tile: of a full one that is 0, and none of its keys count",
)
def a_full_tile(lab: Lab) -> None:
    """error to dense, 64 and 128 tokens"""
    short = error(lab, paged([(1, 63)], kv_heads=2, device=lab.device), 1)
    lab.expect(short < 1e-5, "it is not the full tile: a context of 63 is wrong as well", f"error with 63 tokens {short:.2g}")
    equals_dense(lab, [64, 128])


@check(
    gate="< 1e-5",
    needs="triton",
    probably="a further tile with a higher maximum must shrink the sum *and* the output that was gathered so far",
)
def length_129(lab: Lab) -> None:
    """error to dense, 129 tokens"""
    equals_dense(lab, [129])


@check(gate="< 1e-5", needs="triton", probably="one id of the table is taken for a whole tile: look a block up for each token")
def one_token_a_block(lab: Lab) -> None:
    """error to dense, one token a block"""
    equals_dense(lab, [1, 7, 33], block_size=1)


@check(gate="< 1e-5", needs="triton", probably="16 is written in the kernel where the block size of the cache belongs")
def blocks_of_four(lab: Lab) -> None:
    """error to dense, blocks of 4"""
    equals_dense(lab, [3, 16, 33], block_size=4)


@check(
    gate="< 1e-5",
    needs="triton",
    probably="query head i uses key head i // group: of a program's heads, the first is kv_head * group",
)
def eight_on_two(lab: Lab) -> None:
    """error to dense, 8 heads on 2 key heads"""
    equals_dense(lab, [33], heads=8, kv_heads=2)


@check(
    gate="< 1e-5",
    needs="triton",
    probably="the row and the key head of a program are taken from its number with the wrong divisor",
)
def sixteen_on_eight(lab: Lab) -> None:
    """error to dense, 16 heads on 8 key heads"""
    case = paged([(1, 20), (1, 33)], heads=16, kv_heads=8, device=lab.device)
    lab.measure(error(lab, case, 1), detail="two rows of 16 heads")


@check(
    gate="< 1e-5",
    needs="triton",
    probably="with one query head for each key head the rows that pad a dot to 16 are written out, over other heads",
)
def four_on_four(lab: Lab) -> None:
    """error to dense, 4 heads on 4 key heads"""
    equals_dense(lab, [33], heads=4, kv_heads=4)


@check(
    gate="< 1e-5",
    needs="triton",
    probably="tl.arange takes powers of two alone: 80 needs 128 lanes, and a mask on every load and store",
)
def a_head_of_80(lab: Lab) -> None:
    """error to dense, head sizes 80 and 64"""
    errors = [error(lab, paged([(1, 33), (1, 5)], kv_heads=2, dim=dim, device=lab.device), 1) for dim in (80, 64)]
    lab.measure(max(errors), detail=f"80 and 64: {', '.join(f'{e:.2g}' for e in errors)}")


@check(
    gate="< 1e-5",
    needs="triton",
    probably="a row's length is taken from another row, or the table's stride from its first row's blocks",
)
def ragged_rows(lab: Lab) -> None:
    """error to dense, rows of 1 to 129 tokens"""
    lengths = (40, 1, 129, 32, 16, 3, 65, 9)
    case = paged([(1, n) for n in lengths], kv_heads=2, device=lab.device)
    lab.measure(error(lab, case), detail=f"contexts {lengths}")
    with HostReads() as host:
        lab.app.paged_decode(*case.decode, scale=case.scale)
    lab.measure(host.count, name="numbers read on the host", gate="= 0", unit="reads",
                probably="a length is read on the host: that waits for the device")  # fmt: skip


@check(
    gate="= 0",
    unit="numbers",
    needs="triton",
    probably="a weight of 0 times NaN is NaN: values past the context must not be loaded (mask, other=0)",
)
def junk_past_the_context(lab: Lab) -> None:
    """numbers that junk past a context moves"""
    rows, moved, told = [(1, 3), (1, 21), (1, 65)], 0, ""
    clean = paged(rows, kv_heads=2, device=lab.device, junk=0.0)
    want = decode(lab, clean, 1)
    for junk in (float("nan"), float("inf"), 999.0):
        for splits in (1,):
            case = paged(rows, kv_heads=2, device=lab.device, junk=junk)
            differ = int((~((decode(lab, case, splits) - want).abs() < 1e-5)).sum())
            moved, told = (
                moved + differ,
                told or (f"{differ} of {want.numel()} with {junk} and {splits} splits" if differ else ""),
            )
    lab.measure(moved, detail=told)


@check(gate="< 1e-3", needs="triton", probably="exp of a large score is inf: subtract the running maximum before, not after")
def scores_of_hundreds(lab: Lab) -> None:
    """error to dense, scores of some hundreds"""
    case = paged([(1, 200), (1, 30)], kv_heads=2, device=lab.device)
    case.scale = 40.0
    lab.measure(error(lab, case, 1), detail="scale 40: exp(89) is more than fp32 can hold")


@check(
    gate="< 1e-5",
    needs="triton",
    probably="addresses are worked out from the cache's shape: a view has other strides",
)
def caches_that_are_views(lab: Lab) -> None:
    """error to dense, caches that are views"""
    heads_first = paged([(1, 33), (1, 70)], kv_heads=2, device=lab.device)
    heads_first.k_cache = heads_first.k_cache.transpose(0, 1).contiguous().transpose(0, 1)
    heads_first.v_cache = heads_first.v_cache.transpose(1, 2).contiguous().transpose(1, 2)  # other strides than the keys'
    between = paged([(1, 33), (1, 70)], kv_heads=2, device=lab.device)
    pool = torch.stack([between.k_cache, between.v_cache], 1)  # keys and values of a block beside each other
    between.k_cache, between.v_cache = pool[:, 0], pool[:, 1]
    errors = [error(lab, heads_first), error(lab, between)]
    lab.measure(max(errors), detail=f"heads first {errors[0]:.2g}, keys beside values {errors[1]:.2g}")


@check(gate="< 3e-3", needs="triton", probably="scores or sums are kept in fp16: they are fp32, whatever the cache is")
def half_precision_at_2048(lab: Lab) -> None:
    """error to dense, fp16, 2048 tokens"""
    case = paged([(1, 2048)], heads=4, kv_heads=1, dim=64, dtype=torch.float16, device=lab.device)
    case.scale = 1.0  # scores of some tens: in fp16 they would be off by hundredths
    lab.measure(error(lab, case, 1))


@check(
    gate="< 4",
    unit="bytes",
    needs="triton",
    probably="scores go to memory between two kernels: fold each tile into a running softmax and forget it",
)
def no_score_is_stored(lab: Lab) -> None:
    """bytes made for each further key"""
    made: list[int] = []
    for context in (64, 320):
        case = paged([(1, context)] * 2, kv_heads=2, device=lab.device)
        decode(lab, case, 1)
        with BytesMade() as count:
            lab.app.paged_decode(*case.decode, scale=case.scale, num_splits=1)
        made.append(count.total)
    lab.expect(made[0] > 0, "no tensor came of the call")
    lab.measure((made[1] - made[0]) / 256, baseline=2 * 4 * 4, detail=f"{made[0]:,} bytes at 64 keys, {made[1]:,} at 320")


@check(
    gate="<= 1.1",
    unit="x",
    needs="triton",
    probably="each query head has a program of its own: those that share a key head share its keys",
)
def every_key_is_read_once(lab: Lab) -> None:
    """times that each key is read"""
    case = paged([(1, 256), (1, 128)], heads=8, kv_heads=2, device=lab.device)
    with Launches() as seen:
        case.answer(lab, lambda: lab.app.paged_decode(*case.decode, scale=case.scale, num_splits=1))
    lab.expect(seen.grids, NO_KERNEL)
    if lab.device == "cpu":
        read = seen.read(case.k_cache) + seen.read(case.v_cache)
        lab.expect(read >= case.kv_bytes, NO_KERNEL, f"{read:,} bytes read, there are {case.kv_bytes:,}")
        lab.measure(
            read / case.kv_bytes, detail=f"{read:,} bytes read of the caches, {case.kv_bytes:,} bytes of keys and values"
        )
    else:
        pairs = len(case.keys) * case.k_cache.shape[1]
        lab.measure(seen.programs / pairs, detail=f"{seen.programs} programs for {pairs} pairs of a row and a key head")


@check(
    gate="< 1e-5",
    needs="triton",
    probably="splits are merged by their sums alone: each has a maximum of its own, and is weighed by exp of the difference",
)
def any_number_of_splits(lab: Lab) -> None:
    """error to dense, 1, 2, 3 and 7 splits"""
    case = paged([(1, 300), (1, 129)], kv_heads=2, device=lab.device)
    errors = {splits: error(lab, case, splits) for splits in (1, 2, 3, 7)}
    lab.measure(max(errors.values()), detail=", ".join(f"{splits}: {e:.2g}" for splits, e in errors.items()))


@check(
    gate="< 1e-5",
    needs="triton",
    probably="a split without keys has the maximum -inf and the sum 0: it must weigh nothing, and not NaN",
)
def splits_without_keys(lab: Lab) -> None:
    """error to dense, more splits than tiles"""
    errors = [error(lab, paged([(1, 1), (1, 3), (1, 40)], kv_heads=2, device=lab.device), splits) for splits in (2, 8)]
    lab.measure(max(errors), detail=f"2 splits {errors[0]:.2g}, 8 splits {errors[1]:.2g}")


@check(
    gate=">= 8",
    unit="programs",
    needs="triton",
    probably="num_splits is not used: a row's keys are walked by one program, and the other cores of the card wait",
)
def splits_are_programs(lab: Lab) -> None:
    """programs, one row, 2 key heads, 4 splits"""
    case = paged([(1, 256)], kv_heads=2, device=lab.device)
    programs: list[int] = []
    for splits in (1, 4):
        with Launches() as seen:
            case.answer(lab, lambda splits=splits: lab.app.paged_decode(*case.decode, scale=case.scale, num_splits=splits))
        lab.expect(seen.grids, NO_KERNEL)
        programs.append(seen.programs)
    lab.measure(programs[1], baseline=programs[0], detail=f"grids {seen.grids}")
    lab.measure(len(seen.grids), name="launches of a call", gate="<= 2", unit="launches", detail=f"grids {seen.grids}",
                probably="a launch for each row, split or head: the grid is what those are for")  # fmt: skip


@check(
    gate="> 3",
    unit="x",
    needs="gpu",
    probably="blocks are gathered before the kernel runs, or its tiles are so small that memory waits for arithmetic",
    seconds=180,
)
def faster_than_stage_07(lab: Lab) -> None:
    """faster than stage 07, the worst of three"""
    ratios: dict[str, float] = {}
    for rows, context in ((8, 256), (32, 512), (64, 1024)):
        case = paged([(1, context)] * rows, heads=32, kv_heads=8, dim=128, dtype=torch.float16, device=lab.device)
        ratios[f"{rows} x {context}"] = lab.ratio(
            lambda case=case: paged_attention(*case.ragged, scale=case.scale),
            lambda case=case: lab.app.paged_decode(*case.decode, scale=case.scale),
            name=f"{rows} rows of {context} tokens", gate="> 3",
        )  # fmt: skip
    lab.measure(min(ratios.values()), detail=", ".join(f"{what}: {x:.1f} x" for what, x in ratios.items()))


@check(
    gate="> 50",
    unit="%",
    needs="gpu",
    probably="neighbouring threads read addresses that are far apart: dim must be the fastest axis of every load",
    seconds=180,
)
def share_of_the_read_rate(lab: Lab) -> None:
    """of the rate that this card reads at"""
    rows, context, heads, kv_heads, dim = 32, 4096, 32, 8, 128
    blocks = rows * context // 16
    k_cache, v_cache = (torch.randn(blocks, kv_heads, 16, dim, dtype=torch.float16, device=lab.device) for _ in range(2))
    tables = torch.randperm(blocks, device=lab.device).view(rows, -1).int()
    contexts = torch.full((rows,), context, dtype=torch.int32, device=lab.device)
    q = torch.randn(rows, heads, dim, dtype=torch.float16, device=lab.device)

    def call() -> object:
        return lab.app.paged_decode(q, k_cache, v_cache, tables, contexts, scale=dim**-0.5)

    call()
    bytes_read = 2 * k_cache.numel() * 2
    times = [seconds(call, lab.device, 0.02) for _ in range(5)]
    rate, card = bytes_read / sorted(times)[2], read_rate(lab.device)
    lab.measure(100 * rate / card, detail=f"{rate / 1e9:,.0f} GB/s; this card read {card / 1e9:,.0f} GB/s a moment later")
