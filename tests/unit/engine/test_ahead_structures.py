"""Answers under structures whose next forward is enqueued before tokens are read: the real engine, runner and
grammars over a model that is a table, stepped by hand. Counted: how many steps begin ahead."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.limits import StepLimits
from cluster.engine.runner import LanguageRunner
from cluster.engine.state import AnswerChoice, LanguageRequest, Work
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout, feature_layout
from cluster.model.kv_format import kv_segments
from cluster.model.language import SequenceChunk
from cluster.structure import masks
from cluster.structure.compiler import GrammarCompiler
from cluster.structure.constraints import Constraints
from cluster.structure.masks import MaskFiller
from cluster.types.messages import StartDecode, Tokens
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.worker.cpu_slots import no_cpu_slots
from cluster.worker.outbox import Outbox
from tests.fakes.clock import ManualClock
from tests.fakes.engines import POLICY
from tests.fakes.structures import END, check_valid, demo_source, of_schema, text_of
from tests.fakes.workers import Inbox, ManualExecutor

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE, NUM_TOKENS = 4, 800, 1024, 70
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,9}$"},
        "kind": {"enum": ["person", "thing"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "pattern": "^[a-z ]{3,9}$"},
    },
    "required": ["name", "kind", "age", "city"],
    "additionalProperties": False,
}
TEXT = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["person", "thing"]},
        "text": {"type": "string", "pattern": "^[a-z]{120}$"},
    },
    "required": ["kind", "text"],
    "additionalProperties": False,
}


class TableModel:
    """A `StepModel`: logits follow from the last token and its index alone."""

    recorded_tokens = 0

    def __init__(self) -> None:
        self._table = torch.randn(997, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
        self._table[:, END] = -9.0
        self.num_forwards = 0

    def forward(self, chunks: Sequence[SequenceChunk], *_: object) -> Tensor:
        self.num_forwards += 1
        rows = []
        for chunk in chunks:
            end = chunk.num_computed_tokens + len(chunk.token_ids)
            for back in range(chunk.num_logits, 0, -1):
                rows.append(self._row(chunk.token_ids[-back], end - back))
        return self._table[rows]

    def decode(self, token_ids: Any, context_lens: Sequence[int], *_: object) -> Tensor:
        self.num_forwards += 1
        ids = token_ids.tolist() if isinstance(token_ids, Tensor) else token_ids
        return self._table[[self._row(*each) for each in zip(ids, context_lens, strict=True)]]

    @staticmethod
    def _row(token_id: int, position: int) -> int:
        return (31 * token_id + 7 * position) % 997


class CountingRunner(LanguageRunner):
    """Whether each step of answers was in flight when it began, and how many of its drafts were computed."""

    def __init__(self, *args: Any, **keywords: Any):
        super().__init__(*args, **keywords)
        self.begun: list[bool] = []
        self.num_forced = 0

    def run(self, works: Sequence[Work], on_layer: Any, then: Sequence[AnswerChoice] = ()) -> Any:
        choices = [c for work in works if isinstance(work, LanguageRequest) for c in work.live_choices]
        if choices:
            self.begun.append(all(map(self.is_in_flight, choices)))
            self.num_forced += sum(len(choice.drafts) for choice in choices)
        return super().run(works, on_layer, then)


class Alone:
    """An engine without a cluster."""

    def __init__(self, runs_ahead: bool, state_blocks: int = 0):
        clock, self.inbox, self.executor = ManualClock(), Inbox(), ManualExecutor()
        layout = MemoryLayout(kv_segments([(1, 2)] * 2, BLOCK_SIZE, torch.float32))
        kv, rooms = BlockMemory(layout, 1), BlockMemory(feature_layout(1, BLOCK_SIZE, torch.float32), 1)
        transfer: Any = SimpleNamespace(links={}, codecs={}, sent=None, received=None, num_open=0)
        features = FeatureStore(rooms, BlockPool(1, BLOCK_SIZE), transfer)
        model: Any = SimpleNamespace(
            positions=lambda prompt: None, chunk_cut_spans=False, state_blocks=state_blocks, kv_layout=layout,
            num_layers=1, sliding_window=None, num_adapter_slots=0, max_model_len=1 << 30,
            vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        self.fills = ManualExecutor()
        compiler = GrammarCompiler(demo_source, clock, self.executor)
        constraints = Constraints(compiler, MaskFiller(self, self.executor))  # pyright: ignore
        constraints.attach(self.inbox.call)
        self.steps: Any = TableModel()
        self.runner = CountingRunner(model, self.steps, kv, features, masks=constraints)
        self.tokens: dict[str, list[int]] = {}
        self.is_late = False  # masks are filled when the step has done without them …
        self.is_stuck = False  # … or not yet
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        outbox = Outbox(self._hear)
        outbox.add_door(1)
        self.engine = LanguageEngine(
            model=model, runner=self.runner, blocks=self.pool, transfer_engine=transfer, outbox=outbox,
            clock=clock, policy=POLICY, limits=StepLimits(512, 16, target_s=1.0),
            cpu_slots=no_cpu_slots(clock), features=features, constraints=constraints,
            runs_ahead=runs_ahead,
        )  # fmt: skip

    def submit(self, job: Any, *args: Any) -> Any:
        """As the executor that fills masks."""
        future = self.fills.submit(job, *args)
        if not self.is_late:
            self.fills.run_one()
        return future

    def start(self, name: str, number: int, schema: Any = None) -> None:
        """An answer under the schema, or a plain one."""
        structure = None if schema is None else of_schema(schema, is_compact=True)
        prompt = Prompt((5, 6, 7 + number))
        stop = StopParams(NUM_TOKENS, (END,))
        request = GenerateRequest(name, prompt, (SamplingParams(),), stop, structure=structure)
        self.engine.start(1, StartDecode(request, 3600.0, prefills=True), 0.0)

    @property
    def num_in_vain(self) -> int:
        """Forwards that gave no token. One has computed the prompts."""
        return self.steps.num_forwards - 1 - len(self.runner.begun)

    def turn(self) -> None:
        """Threads do what they can, then there is a step."""
        while self.executor.jobs or (self.fills.jobs and not self.is_stuck):
            self.executor.run_one()
            if not self.is_stuck:
                self.fills.run_one()
        self.inbox.run()
        self.engine.step()

    def play(self) -> None:
        """To the end."""
        for _ in range(1000):
            self.turn()
            if not self.engine.requests:
                break
        self.engine.step()
        assert not self.engine.requests and self.pool.num_referenced == 0

    def _hear(self, batch: Any) -> None:
        for _, message in batch:
            for event in message.events if isinstance(message, Tokens) else ():
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)


def answered(
    num_structured: int, num_plain: int, schema: Any, *, runs_ahead: bool, is_late: bool = False,
    state_blocks: int = 0,
) -> Alone:  # fmt: skip
    alone = Alone(runs_ahead, state_blocks)
    alone.is_late = is_late
    for number in range(num_structured + num_plain):
        alone.start(f"r{number}", number, schema if number < num_structured else None)
    alone.play()
    for number in range(num_structured):
        check_valid(schema, text_of([token for token in alone.tokens[f"r{number}"] if token != END]))
    return alone


@pytest.mark.parametrize(
    ("num_structured", "num_plain", "schema", "share", "num_more"),
    [
        pytest.param(1, 0, FORM, 0.0, 1, id="dense forced text"),
        pytest.param(4, 0, FORM, 0.0, 1, id="four of them"),
        pytest.param(1, 0, TEXT, 0.7, 1, id="a long string"),
        pytest.param(4, 0, TEXT, 0.7, 1, id="four long strings"),
        pytest.param(1, 7, FORM, 0.9, 0, id="one among plain answers"),
        pytest.param(2, 2, FORM, 0.9, 0, id="two among as many plain ones"),
    ],
)
def test_steps_begin_ahead_where_that_pays(num_structured, num_plain, schema, share, num_more):
    """Tokens are those of steps that wait, and but for one at the end of an answer no forward is computed in
    vain. share: of the steps that begin ahead, at least; num_more: steps, at most."""
    waiting = answered(num_structured, num_plain, schema, runs_ahead=False)
    ahead = answered(num_structured, num_plain, schema, runs_ahead=True)
    num_steps, num_ahead = len(ahead.runner.begun), sum(ahead.runner.begun)
    assert ahead.tokens == waiting.tokens and not any(waiting.runner.begun)
    assert num_ahead >= share * num_steps
    assert num_steps <= len(waiting.runner.begun) + num_more
    assert ahead.num_in_vain <= 1


def test_what_states_lack_is_computed_before_anything_goes_ahead():
    """Forced tokens are computed as drafts, which are no part of a state yet."""
    waiting = answered(2, 6, FORM, runs_ahead=False)
    ahead = answered(2, 6, FORM, runs_ahead=True, state_blocks=1)
    assert ahead.tokens == waiting.tokens and ahead.num_in_vain <= 1
    assert sum(ahead.runner.begun) > 0.8 * len(ahead.runner.begun)


@pytest.mark.parametrize("state_blocks", [0, 1])
@pytest.mark.parametrize("num_plain", [0, 3])
def test_late_masks_change_no_token(num_plain, state_blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no mask is computed again, from a state that nothing has written over."""
    monkeypatch.setattr(masks, "GRACE_S", 0.0)
    wanted = answered(2, num_plain, TEXT, runs_ahead=False)
    late = answered(2, num_plain, TEXT, runs_ahead=True, is_late=True, state_blocks=state_blocks)
    assert late.tokens == wanted.tokens
    assert len(late.runner.begun) > len(wanted.runner.begun) and any(late.runner.begun)


def test_others_go_ahead_while_a_mask_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "GRACE_S", 0.0)
    alone = Alone(runs_ahead=True)
    alone.is_late = alone.is_stuck = True
    alone.start("slow", 0, TEXT)
    alone.start("plain", 1)
    for _ in range(30):
        alone.turn()
    assert len(alone.tokens["slow"]) < 3 and len(alone.tokens["plain"]) > 20
    assert all(alone.runner.begun[-15:])
    alone.is_stuck = alone.is_late = False
    alone.play()
    check_valid(TEXT, text_of(alone.tokens["slow"]))
