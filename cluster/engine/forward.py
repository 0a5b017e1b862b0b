"""One step's forward: it hands KV to the port that sends it, fails alone what fails, and teaches the
step-time fits.

A step with answers and prompts lasts about as long as the step of the answers and the part of the prompts
that is more than a step's fixed cost: both read the weights, once. So of such a step, the prompts' fit
learns what the answers do not explain. Used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from cluster.engine.ahead import ForwardAhead
from cluster.engine.kv_output import Ready, StepPush
from cluster.engine.lifecycle import EngineState
from cluster.engine.planner import PromptPlanner
from cluster.engine.state import AnswerChoice, LanguageRequest, PromptWork, Work, WorkResult
from cluster.model.cuda.capture import wait_for_recording
from cluster.model.failures import is_out_of_memory
from cluster.model.language import LanguageModel
from cluster.scheduling.fit import StepFit
from cluster.worker.blame import Blame, ends_engine
from cluster.worker.cpu_slots import CpuSlots

_id_of = attrgetter("request_id")


@dataclass(eq=False)
class StepForward:
    _model: LanguageModel
    _state: EngineState
    _planner: PromptPlanner
    _fit: StepFit  # of steps that only generate answers, by their sequences and the tokens that these see
    _blame: Blame
    _cpu_slots: CpuSlots
    _ahead: ForwardAhead

    def run(
        self, answers: Sequence[LanguageRequest], prompts: Sequence[PromptWork], *, is_all: bool
    ) -> list[tuple[Work, WorkResult]]:
        """Inside a CPU slot. Returns what has succeeded; requests whose work raises alone, too, have failed.
        `is_all`: all answers that can be continued here are in the step."""
        is_alone = is_all and not prompts and not self._planner.has_runnable
        then = iter([self._ahead.plan(answers, is_alone=is_alone)])
        works = [*(request for request in answers if request.live_choices), *prompts]
        if not works:
            self._ahead.drop()
            return []
        done = self._blame.together(
            works,
            lambda some: self._compute(some, next(then, ())),  # nothing is enqueued behind a repetition
            _id_of,
            self.probe,
        )
        self._ahead.finish()
        return done

    def learn(self, works: Sequence[Work], is_long: bool) -> None:
        """Behind the step, before its results are taken in: it has computed this. `is_long`: see
        `PromptPlanner.next_step`."""
        answers = [work for work in works if isinstance(work, LanguageRequest)]
        prompts = [work for work in works if isinstance(work, PromptWork)]
        step_s = self._cpu_slots.ran_s if self._ahead.step_s is None else self._ahead.step_s
        num_sequences = sum(request.num_sequences for request in answers)
        if answers and not prompts:
            self._fit.observe(num_sequences, self._state.counts.mean_context, step_s)
        if prompts:
            if answers:
                context = self._state.counts.mean_context
                step_s -= self._fit.predicted_s(num_sequences, context) - self._fit.predicted_s(0, context)
            self._planner.observe(prompts, is_long, max(0.0, step_s))

    def probe(self) -> None:
        """Raises if the device is broken: computes one token that belongs to no request. Without a free
        block, the device counts as working."""
        block = self._state.blocks.try_allocate(1)
        if block is not None:
            self._state.runner.warm_up_prompt(1, block)
            self._state.blocks.free(block)

    def _compute(self, works: Sequence[Work], then: Sequence[AnswerChoice]) -> list[WorkResult]:
        """After each layer, its KV is posted to the worker that wants it, and the CPU slot may be yielded."""
        sent = [work for work in works if isinstance(work, PromptWork) and work.request.sends]
        push = StepPush(sent, self._model.kv_layout, self._model.num_layers)
        in_step = {work.request_id: work.request for work in sent}

        def on_layer(layer_idx: int, ready: Ready) -> None:
            self._state.kv_output.take_early(in_step)
            push.on_layer(layer_idx, ready)
            self._cpu_slots.yield_between_layers()

        try:
            results = self._state.runner.run(works, on_layer, then)
        except Exception as error:
            # The blocks of what fails are free afterwards: nothing that was enqueued may still write to them.
            if not ends_engine(error):  # a lost device, or lost ranks, would be waited for in vain
                self._state.runner.drop_ahead()
            if is_out_of_memory(error):
                wait_for_recording()  # of the encoder; the works are tried again
            raise
        push.close()
        return results
