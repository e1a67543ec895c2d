"""`TorchBackend`: executes step plans with torch on a CPU.

The state of running requests is indexed by slot and lives here: their tokens, block tables and sampling settings. A plan
changes it by a few entries and names the rows to run; every row is `n_tokens` tokens at positions from `start`, so prefill,
chunk, decode and verification are one path. All columns of a step are made by NumPy at once and handed to torch as they are.

Invariants: a submitted plan's effects are complete when `submit` (or `late`) returns; a slot's tokens are those admitted
with it and those sampled here; no row writes outside its own blocks.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cutaway.backends.torch import sampler as reference_sampler
from cutaway.backends.torch.gather import prepare
from cutaway.backends.torch.kv_cache import KVCache, bytes_per_block, choose_blocks
from cutaway.backends.torch.model import Batch, Decoder
from cutaway.checkpoints import open_checkpoint, resolve
from cutaway.core.errors import CutawayError
from cutaway.core.machine import cores
from cutaway.core.plan import Blocks, KVSpec, LateInputs, Logprobs, StepPlan, StepResult, Ticket
from cutaway.core.request import SamplingParams

BLOCK_SIZE = 16
DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Config(Protocol):
    """What the backend reads of `EngineConfig`."""

    model: str
    dtype: Literal["auto", "bf16", "fp32"]
    max_model_len: int | None
    kv_blocks: int | None
    max_num_seqs: int
    load_format: Literal["auto", "dummy"]
    threads: int | None


class PartsLike(Protocol):
    def get(self, name: str, features: Any = ()) -> Any: ...


@dataclass(slots=True)
class _Step:
    """A submitted plan on its way: what was run, and its result once sampled."""

    plan: StepPlan
    counts: NDArray[np.int64]  # [rows] positions sampled
    logits: torch.Tensor | None = None
    result: StepResult | None = None


@dataclass(slots=True)
class _Slots:
    """State of the running requests, a row a slot."""

    tokens: NDArray[np.int64]  # [slots, window + 1]
    tables: NDArray[np.int32]  # [slots, blocks a window]
    num_prompt: NDArray[np.int64]
    params: list[SamplingParams | None]
    epoch: int = 0  # counts admissions, so that what is derived from params can be kept meanwhile
    columns: tuple[tuple[int, bytes], Any, Any] | None = field(default=None)  # (key, sampling columns, sampler)


class TorchBackend:
    """A model and its KV pool on the CPU. Implements `core.plan.Backend`."""

    def __init__(
        self, model: Decoder, cache: KVCache, attention: Any, parts: PartsLike, *, rows: int, window: int, facts: dict[str, Any]
    ):
        self.model = model
        self.cache = cache
        self.window = window
        self._attention = attention
        self._parts = parts
        blocks = -(-(window + 1) // cache.spec.block_size)
        self._slots = _Slots(
            np.zeros((rows, window + 1), np.int64), np.zeros((rows, blocks), np.int32), np.zeros(rows, np.int64), [None] * rows
        )
        self._late: _Step | None = None
        self._facts = facts

    def kv(self) -> KVSpec:
        return self.cache.spec

    def info(self) -> dict[str, Any]:
        """Facts to print: dtype, bytes of the weights, KV blocks and their bytes, threads, seconds of loading."""
        return dict(self._facts)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Runs the plan; one with `late` as far as its logits, or not at all while its drafts are to come."""
        if self._late is not None:
            raise RuntimeError(f"step {self._late.plan.step} still waits for its late inputs")
        self._change_slots(plan)
        step = _Step(plan, np.where(plan.samples, 1 + plan.n_drafts, 0).astype(np.int64))
        if len(plan.token_ids) == plan.n_drafts.sum():
            self._run(step)
        elif not plan.late:
            raise ValueError(f"step {plan.step} has {plan.n_drafts.sum()} drafts and {len(plan.token_ids)} draft tokens")
        if plan.late:
            self._late = step
        else:
            self._sample(step, None)
        return Ticket(plan.step, step)

    @torch.inference_mode()
    def late(self, ticket: Ticket, inputs: LateInputs) -> None:
        """Completes a plan with `late`: drafts that were missing, then sampling under the masks."""
        step = ticket.payload
        assert isinstance(step, _Step)
        if step is not self._late:
            raise RuntimeError(f"step {ticket.step} does not wait for late inputs")
        if step.logits is None:
            assert inputs.token_ids is not None, f"step {ticket.step} waits for its drafts"
            step.plan.token_ids = inputs.token_ids
            self._run(step)
        self._late = None
        self._sample(step, inputs.masks)

    def collect(self, ticket: Ticket) -> StepResult:
        step = ticket.payload
        assert isinstance(step, _Step)
        if step.result is None:
            raise RuntimeError(f"step {ticket.step} still waits for its late inputs")
        return step.result

    @torch.inference_mode()
    def export_blocks(self, ids: Sequence[int]) -> Blocks:
        return self.cache.export_blocks(ids)

    @torch.inference_mode()
    def import_blocks(self, ids: Sequence[int], blocks: Blocks) -> None:
        self.cache.import_blocks(ids, blocks)

    def _change_slots(self, plan: StepPlan) -> None:
        """Everything of a plan that comes before its rows run."""
        state, size = self._slots, self.cache.spec.block_size
        for slot in plan.released:
            state.tables[slot] = 0
            state.params[slot] = None
        for admission in plan.admitted:
            state.tokens[admission.slot, : len(admission.tokens)] = admission.tokens
            state.tables[admission.slot] = 0
            state.num_prompt[admission.slot] = admission.num_prompt
            state.params[admission.slot] = admission.params
            state.epoch += 1
        if len(plan.block_ids):
            added = np.diff(plan.block_offsets)
            index = np.repeat(plan.block_first - plan.block_offsets[:-1], added) + np.arange(len(plan.block_ids))
            state.tables[np.repeat(plan.slot, added), index] = plan.block_ids
            # Blocks that this step will not fill hold what their last owner left: NaN there would pass through a mask.
            partial = (index + 1) * size > np.repeat(plan.start + plan.n_tokens, added)
            fresh = partial & (index * size >= np.repeat(plan.start, added))
            if fresh.any():
                self.cache.clear(plan.block_ids[fresh].astype(np.int64))
        if plan.copies:
            self.cache.copy(plan.copies)

    def _run(self, step: _Step) -> None:
        """Writes the drafts behind their rows' tokens, and computes the logits of the positions to sample after."""
        plan, state = step.plan, self._slots
        ends = plan.start + plan.n_tokens
        if len(plan.token_ids):
            rows = np.repeat(np.arange(plan.num_rows), plan.n_drafts)
            first = np.cumsum(plan.n_drafts) - plan.n_drafts
            at = np.arange(len(rows)) - first[rows] + (ends - plan.n_drafts)[rows]
            state.tokens[plan.slot[rows], at] = plan.token_ids
        batch = self._batch(plan, ends, step.counts)
        step.logits = self.model.forward(batch, self.cache.keys, self.cache.values, self._attention)

    def _batch(self, plan: StepPlan, ends: NDArray[np.int32], counts: NDArray[np.int64]) -> Batch:
        state, size = self._slots, self.cache.spec.block_size
        starts = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(plan.n_tokens, out=starts[1:])
        positions = np.arange(starts[-1]) + np.repeat(plan.start - starts[:-1], plan.n_tokens)
        slot = np.repeat(plan.slot, plan.n_tokens)
        block, offset = np.divmod(positions, size)
        last = np.cumsum(counts)
        sampled = np.arange(last[-1] if len(last) else 0) + np.repeat(starts[1:] - last, counts)
        tables = state.tables[plan.slot, : -(-int(ends.max(initial=1)) // size)]
        batch = Batch(
            token_ids=torch.from_numpy(state.tokens[slot, positions]),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(state.tables[slot, block].astype(np.int64) * size + offset),
            block_tables=torch.from_numpy(tables),
            context_lens=torch.from_numpy(ends.astype(np.int32)),
            query_starts=torch.from_numpy(starts),
            sampled=torch.from_numpy(sampled),
            extras={},
        )
        if "plan" in getattr(self._attention, "SUPPORTS", ()):  # one preparation for all layers
            batch.extras["plan"] = prepare(
                batch.block_tables, batch.context_lens, batch.query_starts, self.cache.keys[0],
                slots=batch.slots, finite=True,
            )  # fmt: skip
        return batch

    def _sample(self, step: _Step, masks: NDArray[np.uint32] | None) -> None:
        """Samples after every wanted position, accepts drafts, appends the new tokens to their slots."""
        plan, counts, logits = step.plan, step.counts, step.logits
        assert logits is not None
        step.logits = None
        rows = np.repeat(np.arange(plan.num_rows), counts)
        ends = plan.start + plan.n_tokens
        positions = np.arange(len(rows)) + np.repeat(ends - np.cumsum(counts) + 1, counts)  # of the tokens to be sampled
        n_accepted = np.zeros(plan.num_rows, np.int32)
        if not len(rows):
            offsets = np.zeros(plan.num_rows + 1, np.int32)
            none = np.zeros(plan.num_rows, np.bool_)
            step.result = StepResult(plan.slot, plan.generation, n_accepted, offsets, np.zeros(0, np.int32), none)
            return
        sampler, columns = self._columns(plan.slot[rows], positions)
        mask = None if masks is None else torch.from_numpy(masks[rows].view(np.int32))
        sampled = sampler.sample(logits, columns, mask)
        ids: NDArray[np.int64] = sampled.ids.numpy()
        kept = np.ones(len(rows), np.bool_)
        if plan.n_drafts.any():
            kept = self._accept(plan, rows, positions, ids)
            np.add.at(n_accepted, rows[kept], 1)
            n_accepted -= plan.samples
        self._slots.tokens[plan.slot[rows[kept]], positions[kept]] = ids[kept]
        offsets = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(np.bincount(rows[kept], minlength=plan.num_rows), out=offsets[1:])
        bad = np.zeros(plan.num_rows, np.bool_)
        bad[rows[kept & sampled.bad.numpy()]] = True
        step.result = StepResult(
            plan.slot, plan.generation, n_accepted, offsets, ids[kept].astype(np.int32), bad, _logprobs(sampled.logprobs, kept)
        )

    def _accept(
        self, plan: StepPlan, rows: NDArray[np.int64], positions: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which samples stand: a row's first, and each that follows samples equal to their drafts (design: point drafts)."""
        drafts = self._slots.tokens[plan.slot[rows], np.minimum(positions, self.window)]
        wrong = (ids != drafts).astype(np.int64)
        before = np.cumsum(wrong) - wrong
        first = np.searchsorted(rows, rows)  # index of each row's first sample
        return before == before[first]

    def _columns(self, slots: NDArray[np.int32], positions: NDArray[np.int64]) -> tuple[Any, Any]:
        """(sampler, its SamplingRows) for samples of `slots`. What does not change from step to step is kept."""
        state = self._slots
        key = (state.epoch, slots.tobytes())
        if state.columns is None or state.columns[0] != key:
            params = [state.params[slot] for slot in slots]
            assert all(p is not None for p in params), "a row names a slot that nothing was admitted to"
            chosen = [p for p in params if p is not None]
            sampler = self._parts.get("sampler", _features(chosen))
            build = reference_sampler.SamplingRows.build
            history = self._history(slots, positions) if any(p.penalized for p in chosen) else None
            state.columns = (key, build(chosen, torch.from_numpy(positions), history), sampler)
            return sampler, state.columns[1]
        _, columns, sampler = state.columns
        history = self._history(slots, positions) if columns.penalized.numel() else None
        return sampler, columns.at(torch.from_numpy(positions), history)

    def _history(
        self, slots: NDArray[np.int32], positions: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens before each sample, drafts included: [samples, longest], their number, and how many are prompt."""
        tokens = self._slots.tokens[slots, : int(positions.max())]
        return torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(self._slots.num_prompt[slots])


def _features(params: Sequence[SamplingParams]) -> set[str]:
    """What the sampler must support for these requests, beyond greedy and temperature."""
    wanted = {
        "top_k": any(p.top_k > 0 for p in params),
        "top_p": any(p.top_p < 1 for p in params),
        "min_p": any(p.min_p > 0 for p in params),
        "penalties": any(p.penalized for p in params),
        "logprobs": any(p.logprobs is not None for p in params),
    }
    return {name for name, asked in wanted.items() if asked}


def _logprobs(scores: Any, kept: NDArray[np.bool_]) -> Logprobs | None:
    if scores is None:
        return None
    return Logprobs(scores.chosen.numpy()[kept], scores.top_ids.numpy()[kept].astype(np.int32), scores.top.numpy()[kept])


def create(config: Config, parts: PartsLike) -> TorchBackend:
    """Loads `config.model` and makes its backend. Raises CutawayError or CheckpointError in one line."""
    began = time.perf_counter()
    if config.dtype not in DTYPES:
        raise CutawayError(f"--dtype must be one of {', '.join(DTYPES)}, got {config.dtype}")
    dtype = DTYPES[config.dtype]
    threads = config.threads or cores()
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(resolve(config.model), config.load_format)
    window = config.max_model_len or checkpoint.config.max_position
    if not 1 < window <= checkpoint.config.max_position:
        raise CutawayError(
            f"--max-model-len must be from 2 to {checkpoint.config.max_position}, the model's own window, got {window}"
        )
    block_bytes = bytes_per_block(checkpoint.config, BLOCK_SIZE, dtype)
    attention = parts.get("attention", {"sliding_window"} if any(checkpoint.config.sliding_windows) else ())
    with torch.inference_mode():
        model = Decoder(checkpoint, dtype)
        _trim()
        blocks = choose_blocks(config.kv_blocks, block_bytes, BLOCK_SIZE, window)
        head_first = "head_first" in getattr(attention, "SUPPORTS", ())
        cache = KVCache(checkpoint.config, blocks, BLOCK_SIZE, dtype, head_first=head_first)
    facts: dict[str, Any] = {
        "backend": "torch", "model": checkpoint.name, "dtype": str(dtype).removeprefix("torch."), "window": window,
        "weight_bytes": model.nbytes, "kv_blocks": blocks, "kv_bytes": blocks * block_bytes, "threads": threads,
        "load_seconds": round(time.perf_counter() - began, 3),
    }  # fmt: skip
    longest = min(window, (blocks - 1) * BLOCK_SIZE)  # no sequence outgrows the pool
    return TorchBackend(model, cache, attention, parts, rows=config.max_num_seqs, window=longest, facts=facts)


def _trim() -> None:
    """Gives the memory that loading has freed back to the system; glibc keeps it otherwise."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return
    trim(0)
