"""An engine over the fake backend, driven by hand."""

from __future__ import annotations

from cutaway.backends.fake import FakeBackend
from cutaway.core.plan import Limits, StepPlan, StepResult, Ticket
from cutaway.core.prefix_cache import chain
from cutaway.core.request import Output, Request, SamplingParams
from cutaway.engine.engine import Engine
from cutaway.engine.parts import Parts

LIMITS = Limits(rows=4, budget=64, chunk=64, window=400, block_size=4)
POISON = 12345


class Recorder(FakeBackend):
    """Keeps every plan, and how many were in flight when it came."""

    def __init__(self, num_blocks: int = 101, **options: object):
        super().__init__(num_blocks, 4, poison=POISON, **options)
        self.plans: list[StepPlan] = []
        self.in_flight = 0
        self.most_in_flight = 0

    def submit(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return super().submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        self.in_flight -= 1
        return super().collect(ticket)


def make(depth: int = 0, backend: FakeBackend | None = None, limits: Limits = LIMITS, **options: bool) -> Engine:
    return Engine(backend or Recorder(delay=depth + 1), Parts(), limits, depth=depth, **options)


def a_request(
    id: int = 0, length: int = 6, max_tokens: int = 5, stop: frozenset[int] = frozenset(), **params: object
) -> Request:
    tokens = [17 * id + i for i in range(length)]
    settings = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **params})
    return Request(id, tokens, settings, stop, chain(tokens, 4))


def drain(engine: Engine) -> dict[int, list[Output]]:
    outputs: dict[int, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        engine.check()
    return outputs


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def answer(request: Request) -> list[int]:
    engine = make()
    engine.add(request)
    return ids(drain(engine)[request.id])
