"""Loads a model on a CPU whose experts are never in anonymous memory all at once.

vLLM creates all weights of a model, fills them, and then brings one layer after the other into the
kernel's form. Here the experts' weights are created in unnamed files that are mapped (`scratch`),
so what is filled can be written out; each layer that is in the kernel's form goes to the store, and
its memory is free before the next one is begun. Afterwards the model has its experts from the
store, by mapping.

Where the store was written from this very checkpoint (`cachemgr.checkpoint`), only the first MoE
layer is loaded and compared with it: the digest says that the weights are the same, that layer that
vLLM still brings them into the same form. The others are created on torch's meta device, where
copies move nothing, and vLLM sets up their kernels with one expert of zeros.

Upstream: `vllm.model_executor.layers.fused_moe`, vLLM 0.32. Bound to: `create_weights` and
`process_weights_after_loading` of `UnquantizedFusedMoEMethod`, replaced while a model is loaded;
`weight_loader` of the parameters, which copies into them and nothing else. vLLM's public way, a
model loader of one's own, can fill weights, but not say where they are. When vLLM can load weights
to a file, this file can go.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cachemgr.checkpoint import Checkpoint
from cachemgr.settings import CacheSettings
from cachemgr.store import (
    ExpertStore,
    StoreKey,
    StoreWriter,
    TensorSpec,
    digest,
    locked,
    scratch,
    stored_checkpoint,
)
from deployments.vllm_adapter.bindings import (
    CACHE_BINDINGS,
    IncompatibleVllm,
    check_bindings,
)
from deployments.vllm_adapter.expert_cache import (
    WEIGHTS,
    ExpertShare,
    Source,
    check_supported,
    model_fingerprint,
    moe_runners,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_SAFETENSORS_FORMATS = ("auto", "hf", "safetensors")


@contextlib.contextmanager
def loading_to_store(vllm_config: VllmConfig, settings: CacheSettings) -> Iterator[ExpertLoading]:
    """While inside, models that vLLM loads have their experts in files.

    Raises:
        IncompatibleVllm: vLLM lacks a name, or the model's experts cannot be cached.
        StoreError: the store cannot be written, or holds something else.
    """
    check_bindings(CACHE_BINDINGS)
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as Method,
    )

    create, process = Method.create_weights, Method.process_weights_after_loading
    with ExpertLoading(vllm_config, settings) as loading:

        @functools.wraps(create)
        def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
            loading.create(functools.partial(create, self, layer, *args, **kwargs), self, layer)

        @functools.wraps(process)
        def process_weights_after_loading(self: Any, layer: Any) -> None:
            loading.process(functools.partial(process, self, layer), layer)

        Method.create_weights = create_weights
        Method.process_weights_after_loading = process_weights_after_loading
        try:
            yield loading
        finally:
            Method.create_weights = create
            Method.process_weights_after_loading = process


class ExpertLoading:
    """One load of a model: from creating its MoE layers to mapping their experts from the store.

    Holds the lock of the store file, if there is none yet, until it is there: of several engines
    that start on a node, one loads all experts and the others find them.
    """

    def __init__(self, vllm_config: VllmConfig, settings: CacheSettings) -> None:
        self._config, self._folder = vllm_config, Path(settings.store_dir)
        self._held = contextlib.ExitStack()  # lock, and the writer if there is one
        self._writer: StoreWriter | None = None
        self._skips = self._writes = False
        self._checkpoint: Checkpoint | None = None
        self._layout, self._share = "", ExpertShare(0, 1, 0)
        self._num_created = 0
        self._index: dict[int, int] = {}  # MoE layer by id of its module
        self._specs: dict[int, tuple[TensorSpec, ...]] = {}
        self._digests: dict[tuple[int, str], str] = {}

    def __enter__(self) -> ExpertLoading:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def create(self, original: Callable[[], None], method: Any, layer: Any) -> None:
        """Create one layer's weights: in files, or nowhere if the store has them."""
        if self._index:
            raise IncompatibleVllm(
                "the expert cache cannot serve a draft model with MoE layers of its own: take "
                "another for speculative decoding, or set cache.enabled to false"
            )
        if not self._num_created:
            self._begin(method, layer)
        self._num_created += 1
        if self._skips and self._num_created > 1:
            with torch.device("meta"):
                original()
            return
        original()
        for name in WEIGHTS:
            parameter = getattr(layer, name)
            shape, dtype = parameter.shape, parameter.dtype
            # What vLLM has allocated was not written to, so it never was memory.
            mapped = scratch(self._folder, parameter.nbytes)
            parameter.data = torch.frombuffer(mapped, dtype=dtype).reshape(shape)

    def process(self, original: Callable[[], None], layer: Any) -> None:
        """Bring one layer into the kernel's form, keep it in the store and free it."""
        if not self._index:
            runners = moe_runners(self._config)
            check_supported(self._config, runners)
            self._index = {id(r.routed_experts): i for i, r in enumerate(runners)}
        index, is_loaded = self._index[id(layer)], not layer.w13_weight.is_meta
        if not is_loaded:
            for name in WEIGHTS:
                one = torch.zeros_like(getattr(layer, name)[:1], device="cpu")
                _set(layer, name, one)
        original()
        weights = {name: getattr(layer, name).data for name in WEIGHTS}
        self._specs[index] = tuple(_spec(name, tensor) for name, tensor in weights.items())
        if self._writes and self._writer is None:
            # All layers have this one's shapes, or the model is not supported.
            key = self._key(self._share.rank, (self._specs[index],) * len(self._index))
            self._writer = self._held.enter_context(StoreWriter(self._path(key), key))
        for name, tensor in weights.items():
            if self._writer is not None:
                self._writer.write(index, name, _bytes(tensor))
            elif is_loaded:
                self._digests[index, name] = digest(_bytes(tensor))
            _set(layer, name, tensor.new_empty(0))

    def finish(self) -> list[Source]:
        """After loading: complete the store, and give the model its experts from there.

        With expert parallelism a rank maps the files of all ranks, so that it may compute any
        expert.

        Returns:
            The experts of each layer; none, if vLLM has loaded no layer that can be cached.
        """
        if not self._specs:
            return []
        if self._checkpoint is not None:
            self._checkpoint.check_unchanged()
        if self._writer is not None:
            self._writer.commit(self._checkpoint.sha256 if self._checkpoint else None)
        self._held.close()
        if self._share.size > 1:
            from vllm.distributed import get_ep_group

            get_ep_group().barrier()  # the other ranks' files are there
        tensors_L = tuple(self._specs[layer] for layer in range(len(self._specs)))
        keys = [self._key(rank, tensors_L) for rank in range(self._share.size)]
        stores = [ExpertStore.open(self._path(key), key) for key in keys]
        own = stores[self._share.rank]
        for (layer, name), sha256 in self._digests.items():
            own.check_same(layer, name, sha256)
        sources = []
        for layer, runner in enumerate(moe_runners(self._config)):
            source: Source = {}
            for spec in tensors_L[layer]:
                parts = [_as_tensor(store.tensor(layer, spec.name), spec) for store in stores]
                source[spec.name] = parts[0] if len(parts) == 1 else [e for p in parts for e in p]
                _set(runner.routed_experts, spec.name, parts[self._share.rank])
            sources.append(source)
        return sources

    def _begin(self, method: Any, layer: Any) -> None:
        """Decide at the first layer what has to be loaded."""
        parallel = self._config.parallel_config
        self._share = ExpertShare.of(layer)
        part = "all experts"
        if self._share.size == 1 and parallel.world_size > 1:
            part = f"rank {parallel.rank} of {parallel.world_size}"
        self._layout = f"{method.experts_cls.__name__} {layer.params_dtype} {part}"
        path = self._path(self._key(self._share.rank, ()))
        self._checkpoint = _checkpoint(self._config)
        self._held.enter_context(locked(path))
        if not path.exists():
            self._writes = True
            logger.info("expert cache: writing the store %s", path)
            return
        self._held.close()
        stored = stored_checkpoint(path)
        self._skips = self._checkpoint is not None and stored == self._checkpoint.sha256
        logger.info(
            "expert cache: experts %s the store %s",
            "are in" if self._skips else "are loaded to be compared with",
            path,
        )

    def _key(self, rank: int, tensors_L: tuple[tuple[TensorSpec, ...], ...]) -> StoreKey:
        share, layout = self._share, self._layout
        if share.size > 1:
            layout += f" of rank {rank} of {share.size}"
        return StoreKey(model_fingerprint(self._config), layout, share.num_local, tensors_L)

    def _path(self, key: StoreKey) -> Path:
        return self._folder / key.file_name


def _checkpoint(vllm_config: VllmConfig) -> Checkpoint | None:
    """What the model is loaded from; None: not known as files, or read in a way of its own."""
    model, folder = vllm_config.model_config, Path(vllm_config.model_config.model)
    is_plain = vllm_config.load_config.load_format in _SAFETENSORS_FORMATS
    if not is_plain or model.hf_overrides or not folder.is_dir():
        return None
    return Checkpoint.read(folder)


def _set(layer: Any, name: str, tensor: torch.Tensor) -> None:
    setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape[1:]),
        nbytes=tensor[0].nbytes,
    )


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's experts as bytes, shape (E, N)."""
    return tensor.contiguous().view(torch.uint8).reshape(tensor.shape[0], -1).numpy()


def _as_tensor(data_EN: np.ndarray[Any, np.dtype[np.uint8]], spec: TensorSpec) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch warns that it could write to what is mapped read-only; nothing here does.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(data_EN)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return flat.view(dtype).reshape(len(data_EN), *spec.shape)
