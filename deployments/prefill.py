"""Prefill replica: Ray Serve LLM's server with one more method."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from deployments.replica import Heartbeat, set_side_channel


class PrefillServer(LLMServer):
    """Computes prompts, one token each, and hands over KV addresses and expert counts."""

    async def __init__(  # type: ignore[misc]
        self, llm_config: LLMConfig, *, app_name: str, port_base: int
    ) -> None:
        set_side_channel(ray.util.get_node_ip_address(), port_base)
        await super().__init__(llm_config)
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._num_running = 0
        self._heartbeat = Heartbeat(
            app_name, "prefill", replica_id, None, lambda: self._num_running, self.check_health
        )
        self._heartbeat.start()

    async def prefill(
        self, prefix_key: bytes, kind: str, body: bytes, request_id: str
    ) -> dict[str, Any]:
        """Compute one prompt.

        Args:
            prefix_key: beginning of the prompt; read by the request router alone.
            kind: "chat" or "completion".
            body: sanitised OpenAI request, JSON.
            request_id: id for the logs and for vLLM.

        Returns:
            {"kv_transfer_params", "prompt_tokens"}, or {"status", "error"} with vLLM's error.
        """
        model = ChatCompletionRequest if kind == "chat" else CompletionRequest
        request = model.model_validate_json(body)
        request.request_id = request_id
        call = self.chat if kind == "chat" else self.completions
        self._num_running += 1
        try:
            async for answer in await call(request):
                if (error := getattr(answer, "error", None)) is not None:
                    return {"status": int(error.code or 500), "error": error.model_dump()}
                return {
                    "kv_transfer_params": answer.kv_transfer_params,
                    "prompt_tokens": answer.usage.prompt_tokens,
                }
        finally:
            self._num_running -= 1
        return {"status": 500, "error": {"message": "prefill engine gave no answer"}}

    async def __del__(self) -> None:
        await self._heartbeat.stop()
