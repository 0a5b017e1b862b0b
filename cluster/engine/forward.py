"""One step's forward: it hands KV to the port that sends it, fails alone what fails, and teaches the
step-time fits.

A step with answers and prompts lasts about as long as the step of the answers and the part of the prompts
that is more than a step's fixed cost: both read the weights, once. So of such a step, the prompts' fit
learns what the answers do not explain. Used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.engine.kv_output import Ready, StepPush
from cluster.engine.lifecycle import EngineState
from cluster.engine.planner import PromptPlanner
from cluster.engine.state import AnswerWork, PromptWork, Work, WorkResult
from cluster.model.language import LanguageModel
from cluster.scheduling.fit import StepFit
from cluster.worker.blame import Blame
from cluster.worker.cpu_slots import CpuSlots


class StepForward:
    def __init__(
        self,
        model: LanguageModel,
        state: EngineState,
        planner: PromptPlanner,
        fit: StepFit,
        blame: Blame,
        cpu_slots: CpuSlots,
    ):
        """`fit`: of steps that only generate answers, by their sequences and the tokens that these see."""
        self._model = model
        self._state = state
        self._planner = planner
        self._fit = fit
        self._blame = blame
        self._cpu_slots = cpu_slots

    def run(
        self, answers: Sequence[AnswerWork], prompts: Sequence[PromptWork]
    ) -> list[tuple[Work, WorkResult]]:
        """Inside a CPU slot. Returns what has succeeded; requests whose work raises alone, too, have
        failed."""
        return self._blame.together([*answers, *prompts], self._compute, _id_of, self.probe)

    def learn(self, works: Sequence[Work], is_long: bool) -> None:
        """Behind the step, before its results are taken in: it has computed this. `is_long`: see
        `PromptPlanner.next_step`."""
        answers = [work for work in works if isinstance(work, AnswerWork)]
        prompts = [work for work in works if isinstance(work, PromptWork)]
        step_s, num_sequences = self._cpu_slots.ran_s, sum(work.request.num_sequences for work in answers)
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

    def _compute(self, works: Sequence[Work]) -> list[WorkResult]:
        """After each layer, its KV is posted to the worker that wants it, and the CPU slot may be yielded."""
        sent = [work for work in works if isinstance(work, PromptWork) and work.request.sends]
        push = StepPush(sent, self._model.kv_layout, self._model.num_layers)
        in_step = {work.request.request_id: work.request for work in sent}

        def on_layer(layer_idx: int, ready: Ready) -> None:
            self._state.kv_output.take_early(in_step)
            push.on_layer(layer_idx, ready)
            self._cpu_slots.yield_between_layers()

        results = self._state.runner.run(works, on_layer)
        push.close()
        return results


def _id_of(work: Work) -> str:
    return work.request.request_id
