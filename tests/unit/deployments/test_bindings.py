"""The adapter against the installed vLLM."""

import pytest

from deployments.vllm_adapter.bindings import (
    BINDINGS,
    CACHE_BINDINGS,
    Binding,
    IncompatibleVllm,
    check_bindings,
)


def test_installed_vllm_has_every_bound_name() -> None:
    check_bindings()
    check_bindings(CACHE_BINDINGS)


@pytest.mark.parametrize(
    "missing",
    [
        Binding("vllm.forward_context", "no_such_name", "a test"),
        Binding("vllm.no_such_module", "anything", "a test"),
    ],
)
def test_missing_name_stops_the_start_and_is_named(missing: Binding) -> None:
    with pytest.raises(IncompatibleVllm, match=f"{missing.module}.{missing.attribute}.*a test"):
        check_bindings((*BINDINGS, missing))
