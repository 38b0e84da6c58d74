"""Schedulers that hand the worker's expert counts to the connector in time.

Upstream: `vllm.v1.core.sched.scheduler`, vLLM 0.32. The stock scheduler frees finished requests,
and with that calls `request_finished`, before it calls `update_connector_output`; counts of the
very step that finished a prefill would come too late. When the order changes upstream, this file
can go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


def _hand_over(connector: Any, output: ModelRunnerOutput) -> None:
    kv_output = output.kv_connector_output
    meta = kv_output.kv_connector_worker_meta if kv_output is not None else None
    if meta is not None:
        connector.take_worker_meta(meta)


class SignatureScheduler(Scheduler):
    """Stock scheduler; counts reach the connector before finished requests are freed."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        _hand_over(self.connector, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)


class AsyncSignatureScheduler(AsyncScheduler):
    """The same for asynchronous scheduling (vLLM's default on GPUs)."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        _hand_over(self.connector, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)
