"""Choose the next token of every row in one pass, whatever mix of settings the rows have (stage 13).

Order of effects, as vLLM has it: penalties, mask, temperature, top-k, top-p, min-p, draw. A draw is the Gumbel-max trick
(Gumbel 1954; Maddison et al. 2014): argmax of scaled logits plus noise is a sample of their softmax, so no row needs
a normalised distribution, and greedy decoding is the same line without the noise. The noise of a token is a hash of
(seed, position, token id): a row's token does not depend on its neighbours, its place in the batch or what ran before.

Filters are thresholds. Each of top-k, top-p and min-p amounts to a smallest logit that stays, the row keeps what reaches the
largest of the three, and tokens of equal logit stand or fall together: what is kept is a function of the values, never of a
sort's order. A threshold almost always lies among a few largest logits, so these are found first, and a row whose threshold
is not among them gets the sort of its whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cutaway.core.request import SamplingParams

SUPPORTS = frozenset({"top_k", "top_p", "min_p", "penalties", "logprobs"})

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: logits divided by it would overflow
CANDIDATES = 256  # largest logits looked at where no small top-k bounds the filters
SPARE = 16  # candidates past a top-k, to see that no further logit equals its last
BLOCK = 64  # logits that share a maximum in the search for the largest
_INF = float("inf")


@dataclass(slots=True)
class SamplingRows:
    """The settings of a batch as columns, one row a sampled token. Make it with `build`.

    temperature, top_p, min_p, repetition, presence, frequency   float32 [rows]; temperature 0 is greedy
    top_k, seeds, positions   int64 [rows]; top_k 0 keeps all; a position is the index of the token to be sampled
    history      ints [rows, longest]: prompt and answer so far, anything past a row's length; None if no row is penalized
    lengths, num_prompt       ints [rows]: tokens of the history, and how many of them are prompt
    plain, filtered, penalized, scored   int64 [n]: rows drawn from the whole vocabulary, drawn through filters, with
                 penalties, and asking for log-probabilities. The rest of them: argmax.
    bound        the largest top_k if every filtered row has one, else 0
    whole_mass   whether some filtered row has a top_p and no top_k
    num_logprobs the most alternatives that any row asks for
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    seeds: Tensor
    positions: Tensor
    history: Tensor | None
    lengths: Tensor | None
    num_prompt: Tensor | None
    plain: Tensor
    filtered: Tensor
    penalized: Tensor
    scored: Tensor
    bound: int = 0
    whole_mass: bool = False
    num_logprobs: int = 0

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        positions: Tensor | Sequence[int],
        history: tuple[Tensor, Tensor, Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """Columns of `params`. `history` is (tokens [rows, longest], lengths [rows], num_prompt [rows]).

        Raises ValueError for a penalized batch without history, and for a sampled row without a seed, naming the row.
        """
        floats = np.array(
            [
                (
                    0.0 if p.temperature < GREEDY_BELOW else p.temperature,
                    p.top_p,
                    p.min_p,
                    p.repetition_penalty,
                    p.presence_penalty,
                    p.frequency_penalty,
                )
                for p in params
            ],
            np.float32,
        ).reshape(len(params), 6)
        drawn = [i for i, p in enumerate(params) if p.temperature >= GREEDY_BELOW]
        missing = [i for i in drawn if params[i].seed is None]
        if missing:
            raise ValueError(f"row {missing[0]} is sampled and has no seed")
        filtered = [i for i in drawn if params[i].top_k > 0 or params[i].top_p < 1 or params[i].min_p > 0]
        narrow = set(filtered)
        scored = [i for i, p in enumerate(params) if p.logprobs is not None]

        def index(rows: Sequence[int]) -> Tensor:
            return torch.tensor(rows, dtype=torch.int64, device=device)

        top_ks = [max(p.top_k, 0) for p in params]
        columns = torch.from_numpy(floats).to(device).unbind(1)
        rows = cls(
            *columns,
            top_k=index(top_ks),
            seeds=index([_signed(p.seed or 0) for p in params]),
            positions=torch.empty(0),
            history=None,
            lengths=None,
            num_prompt=None,
            plain=index([i for i in drawn if i not in narrow]),
            filtered=index(filtered),
            penalized=index([i for i, p in enumerate(params) if p.penalized]),
            scored=index(scored),
            bound=max((top_ks[i] for i in filtered), default=0) if all(top_ks[i] for i in filtered) else 0,
            whole_mass=any(params[i].top_p < 1 and not top_ks[i] for i in filtered),
            num_logprobs=max((params[i].logprobs or 0 for i in scored), default=0),
        )
        return rows.at(positions, history)

    def at(self, positions: Tensor | Sequence[int], history: tuple[Tensor, Tensor, Tensor] | None = None) -> SamplingRows:
        """The same requests at their next token: all that changes from one step to the next."""
        if history is None and self.penalized.numel():
            raise ValueError(f"row {int(self.penalized[0])} is penalized and the batch has no history")
        tokens, lengths, num_prompt = history if history is not None else (None, None, None)
        where = torch.as_tensor(positions, dtype=torch.int64, device=self.temperature.device)
        return replace(self, positions=where, history=tokens, lengths=lengths, num_prompt=num_prompt)


def _signed(seed: int) -> int:
    """A 64-bit pattern as the int64 that has it: OpenAI's seeds may be over 2**63."""
    return (seed + 2**63) % 2**64 - 2**63


@dataclass(slots=True)
class Scores:
    """Log-probabilities of the raw logits. chosen float32 [rows], top_ids int64 [rows, k], top float32 [rows, k], best
    first; k is the most that any row asked for; rows that did not ask hold NaN."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(slots=True)
class Sampled:
    """ids int64 [rows]; bad bool [rows]: NaN or +inf among the raw logits, or no token left to choose; such a row's id
    means nothing."""

    ids: Tensor
    bad: Tensor
    logprobs: Scores | None = None


def sample(logits: Tensor, rows: SamplingRows, mask: Tensor | None = None) -> Sampled:
    """One token for each row of logits [rows, vocabulary]; the logits are left as they are.

    `mask` is uint32 (or int32) [rows, ceil(vocabulary / 32)]: bit i of word w set allows token 32 w + i.
    A greedy row takes the largest logit, of equal ones the lowest id.
    """
    raw = logits.float()
    logits = penalize(raw, rows)
    if mask is not None:
        logits = logits.masked_fill(~_unpack(mask, logits.shape[1]), -_INF)
    ids = logits.argmax(-1)
    bad = ~logits.gather(1, ids[:, None]).squeeze(1).isfinite()  # NaN counts as largest, and so does +inf
    if mask is not None:
        bad |= ~raw.amax(-1).isfinite()
    if rows.plain.numel():
        scaled = _scale(logits, rows, rows.plain)
        drawn = scaled.add_(noise(rows.seeds[rows.plain], rows.positions[rows.plain], logits.shape[1])).argmax(-1)
        ids[rows.plain] = drawn
    if rows.filtered.numel():
        ids[rows.filtered] = _draw_filtered(_scale(logits, rows, rows.filtered), rows)
    return Sampled(ids, bad, _scores(raw, ids, rows) if rows.scored.numel() else None)


def penalize(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [rows, vocabulary] after the repetition (CTRL, Keskar et al. 2019), presence and frequency penalties.

    Work goes by the tokens of the history, not by the vocabulary. Gathered values are written back, so a token that occurs
    twice is written twice with the same value; positions that are none of a row's tokens repeat one that is.
    """
    if not rows.penalized.numel():
        return logits
    assert rows.history is not None and rows.lengths is not None and rows.num_prompt is not None
    index = rows.penalized
    part = logits[index]
    tokens = rows.history[index].long()
    length, prompt = rows.lengths[index, None].long(), rows.num_prompt[index, None].long()
    repetition, presence, frequency = rows.repetition[index, None], rows.presence[index, None], rows.frequency[index, None]
    place = torch.arange(tokens.shape[1], device=tokens.device)

    seen = torch.where(place < length, tokens, tokens[:, :1])
    value = part.gather(1, seen)
    part.scatter_(1, seen, torch.where(value > 0, value / repetition, value * repetition))

    answered = (place >= prompt) & (place < length)
    first = tokens.gather(1, prompt.clamp(max=tokens.shape[1] - 1))
    output = torch.where(answered, tokens, torch.where(length > prompt, first, tokens[:, :1]))
    presence = presence * (length > prompt)  # a row without an answer writes its first token back as it is
    part.scatter_(1, output, part.gather(1, output) - presence)
    part.scatter_add_(1, output, -frequency * answered)
    return logits.index_copy(0, index, part)


def keep(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [rows, vocabulary], temperature applied, with -inf for all that top-k, top-p and min-p drop.

    top-p takes the smallest set that reaches p of what top-k left; min-p goes by the row's largest probability. Equal
    logits stay or go together; the largest always stays.
    """
    values = _descending(logits)
    total = (values - values[:, :1]).exp_().sum(1, keepdim=True)
    return logits.masked_fill(logits < _cutoff(values, total, rows.top_k, rows.top_p, rows.min_p), -_INF)


def noise(seeds: Tensor, positions: Tensor, vocabulary: int | Tensor) -> Tensor:
    """Gumbel noise float32 [rows, n] for int64 seeds and positions [rows], of token ids 0..vocabulary-1 or of the ids
    [rows, n] given: a hash, so that equal (seed, position, id) have equal noise in any batch and any shape.

    A row's 64-bit key (Steele et al. 2014, splitmix64) enters a 32-bit hash of the id (Wellons' lowbias32 constants) in
    two halves. 31 bits make the exponential variate -log1p(-u), which keeps its precision near 0, where large noise is.
    """
    key = _mix(_mix(seeds) + positions * -7046029254386353131)[:, None]
    if isinstance(vocabulary, int):
        ids = torch.arange(vocabulary, dtype=torch.int32, device=seeds.device)
    else:
        ids = vocabulary.to(torch.int32)
    x = ids * -1640531527 + (key & 0x7FFFFFFF).to(torch.int32)  # 2**32 over the golden ratio
    _shift_xor(x, 16).mul_(0x7FEB352D).bitwise_xor_((key >> 32).to(torch.int32))
    _shift_xor(x, 15).mul_(-2073254261)
    _shift_xor(x, 16).bitwise_and_(0x7FFFFFFF)
    uniform = x.float().add_(0.5).mul_(2.0**-31 * (1 - 2.0**-23))  # never 0, never 1
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """x ^= x >>> bits for int32. torch's own shift of signed numbers copies the sign, which the mask takes away."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64."""
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)


def _scale(logits: Tensor, rows: SamplingRows, index: Tensor) -> Tensor:
    """The rows of `index` over their temperatures, with 0 as the largest: a new tensor that cannot overflow."""
    part = logits if len(index) == len(logits) else logits[index]
    return (part - part.amax(-1, keepdim=True)).div_(rows.temperature[index, None])


def _draw_filtered(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Ids of the filtered rows: among the largest candidates where these hold all that is kept, else among all tokens."""
    index, vocabulary = rows.filtered, scaled.shape[1]
    seeds, positions = rows.seeds[index], rows.positions[index]
    settings = rows.top_k[index], rows.top_p[index], rows.min_p[index]
    total = scaled.exp().sum(1, keepdim=True) if rows.whole_mass else scaled[:, :1]
    count = min(rows.bound + SPARE if 0 < rows.bound <= CANDIDATES else CANDIDATES, vocabulary)
    values, ids = _largest(scaled, count)
    cut = _cutoff(values, total, *settings)
    score = (values + noise(seeds, positions, ids)).masked_fill_(values < cut, -_INF)
    drawn = ids.gather(1, score.argmax(-1, keepdim=True)).squeeze(1)
    if count == vocabulary:
        return drawn
    lost = (~(cut > values[:, -1:]).squeeze(1) | (settings[0] > count)).nonzero().squeeze(1)
    if lost.numel():
        part = scaled if len(lost) == len(scaled) else scaled[lost]
        cut = _cutoff(_descending(part), total[lost], *(s[lost] for s in settings))
        score = noise(seeds[lost], positions[lost], vocabulary).add_(part).masked_fill_(part < cut, -_INF)
        drawn[lost] = score.argmax(-1)
    return drawn


def _cutoff(values: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit that stays, [rows, 1]. `values` [rows, n] are the row's n largest, descending; `total` [rows, 1] the
    mass of all its tokens, over that of the largest. At most the last of `values` where what stays may go on after it."""
    last = values.shape[1] - 1
    peak = values[:, :1]
    kth = values.gather(1, (top_k[:, None] - 1).clamp(0, last))
    kth = kth.masked_fill(top_k[:, None] == 0, -_INF)
    mass = (values - peak).exp_().masked_fill_(values < kth, 0.0).cumsum(1)
    total = torch.where(top_k[:, None] > 0, mass[:, -1:], total)
    short = (mass < top_p[:, None] * total).sum(1, keepdim=True)  # tokens that come before p is reached
    nucleus = values.gather(1, short.clamp(max=last)).masked_fill(top_p[:, None] >= 1, -_INF)
    return torch.maximum(torch.maximum(kth, nucleus), peak + min_p[:, None].log())


def _largest(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row, descending, and their ids.

    They lie in the n blocks of largest maxima, whose few elements are all that is sorted: topk over a whole vocabulary takes
    ten times as long on a CPU. Block j holds the ids j, j + blocks, ..., so that maxima of neighbours are one vector operation.
    """
    rows, vocabulary = logits.shape
    blocks = vocabulary // BLOCK
    if n >= blocks:
        values, ids = logits.topk(n)
        return values, ids
    chosen = logits[:, : blocks * BLOCK].unflatten(1, (BLOCK, blocks)).amax(1).topk(n, sorted=False).indices
    ids = (torch.arange(0, blocks * BLOCK, blocks, device=logits.device)[:, None] + chosen[:, None]).flatten(1)
    rest = torch.arange(blocks * BLOCK, vocabulary, device=logits.device).expand(rows, -1)
    ids = torch.cat((ids, rest), 1)
    values, order = logits.gather(1, ids).topk(n)
    return values, ids.gather(1, order)


def _descending(logits: Tensor) -> Tensor:
    """Rows sorted, largest first. NumPy's sort of float32 is vectorised: 40 times as fast as torch's on a CPU."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(1)


def _unpack(mask: Tensor, vocabulary: int) -> Tensor:
    """Bits [rows, words] of 32 as bool [rows, vocabulary]."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask.view(torch.int32)[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary]


def _scores(raw: Tensor, ids: Tensor, rows: SamplingRows) -> Scores:
    """Of the rows that asked, and NaN for the others. Equal logits come in order of their ids."""
    index, k = rows.scored, rows.num_logprobs
    part = raw if len(index) == len(raw) else raw[index]
    norm = part.logsumexp(-1, keepdim=True)
    top_ids = _largest(part, min(k, part.shape[1]))[1].sort(1).values
    top, order = part.gather(1, top_ids).sort(dim=1, descending=True, stable=True)
    scores = Scores(
        chosen=torch.full((len(raw),), float("nan"), device=raw.device),
        top_ids=torch.zeros((len(raw), k), dtype=torch.int64, device=raw.device),
        top=torch.full((len(raw), k), float("nan"), device=raw.device),
    )
    scores.chosen[index] = (part.gather(1, ids[index, None]) - norm).squeeze(1)
    scores.top_ids[index, : top_ids.shape[1]] = top_ids.gather(1, order)
    scores.top[index, : top.shape[1]] = top - norm
    return scores
