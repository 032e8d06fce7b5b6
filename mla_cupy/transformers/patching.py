"""Patching of models: `patch`, `unpatch`, and `attn_implementation="mla_cupy"`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import transformers
from torch import nn

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.transformers.attention import Served
from mla_cupy.transformers.families import DECLINED, FAMILIES, Family, Sizes, model_types
from mla_cupy.transformers.group import Group, forget, group_of, logger
from mla_cupy.transformers.masks import NAME, register

OLDEST = (5, 17)
_before: dict[int, str] = {}
_COMMON = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "scaling", "layer_idx", "attention_dropout")


def patch(model: Any, *, sparse: bool | None = None, context_parallel: Any = None, reference: bool = False) -> Any:
    """Replace the attention of a loaded transformers model by these kernels.

    Parameters
    ----------
    model : PreTrainedModel
        A model of a type that `mla-cupy transformers check` lists.
    sparse : bool, optional
        Attend to the tokens that an indexer selects; the model has one of its own or from `add_indexer`. Default: True
        if the model type has an indexer of its own.
    context_parallel : ProcessGroup, optional
        Ranks that each hold a part of every row, for training and prefill without a cache. Call the model on each rank
        with its part, which `context_parallel_inputs` cuts, and sum the gradients over the group.
    reference : bool
        Also serve tensors on the CPU, with the NumPy reference: slow, for tests.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    ArgumentError
        If the model type, its head sizes or this version of transformers are not supported, or `sparse` is True
        for a model without an indexer; nothing has changed.

    Notes
    -----
    The modules keep their weights, names and hooks; only the forward methods of the attention modules are replaced. A
    call that no kernel supports runs the stock forward method, and the logger "mla_cupy.transformers" names each reason
    once. With `context_parallel` or an indexer from `add_indexer` it raises `ArgumentError` instead.

    Examples
    --------
    >>> model = AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V2-Lite", dtype="bfloat16")  # doctest: +SKIP
    >>> mla_cupy.transformers.patch(model.to("cuda")).generate(**inputs)  # doctest: +SKIP
    """
    family = family_of(model.config)
    modules = list(attention_modules(model, family))
    if not modules:
        raise ArgumentError(explain("model", f"no {family.attention} in it", "a model with MLA of transformers"))
    sparse = family.indexer is not None if sparse is None else sparse
    _check_sparse(sparse, family, modules)
    for module in modules:
        _detach(module)  # also of a deep copy of a patched model
        if problem := problem_of(module, family):
            raise ArgumentError(explain("transformers", f"{transformers.__version__}: {problem}", "5.17 or newer"))
    _before.setdefault(id(model), model.config._attn_implementation)
    for module in modules:
        attach(module, reference=reference)
        if group := group_of(module.config):
            group.sparse = sparse
            group.context = context_parallel
    model.set_attn_implementation(NAME)
    return model


def _check_sparse(sparse: bool, family: Family, modules: list[Any]) -> None:
    if family.indexer and not sparse:
        raise ArgumentError(explain("sparse", sparse, f"True, as {family.attention} selects tokens"))
    if sparse and not family.indexer and not all(hasattr(module, "indexer") for module in modules):
        expected = "False for a model without an indexer"
        raise ArgumentError(explain("sparse", sparse, expected, "call add_indexer(model, ...) first"))


def unpatch(model: Any) -> Any:
    """Restore a model's stock attention.

    Parameters
    ----------
    model : PreTrainedModel

    Returns
    -------
    PreTrainedModel
        The same model. Its filled caches stay usable.
    """
    for module in model.modules():
        _detach(module)
    model.set_attn_implementation(_before.pop(id(model), "sdpa"))
    return model


def family_of(config: Any) -> Family:
    """Return the family of a configuration.

    Raises
    ------
    ArgumentError
        If it is not supported.
    """
    for name, text in model_types(config):
        if name in DECLINED:
            got = f"{name}, which is not served because {DECLINED[name]}"
            raise ArgumentError(explain("model_type", got, served_types()))
        if name in FAMILIES:
            sizes = Sizes.of(text)
            if not (sizes.decodes or sizes.prefills) or (FAMILIES[name].indexer and not sizes.is_sparse):
                raise ArgumentError(
                    explain("head sizes", f"{sizes}", "sizes that a kernel has", "`mla-cupy transformers check`")
                )
            return FAMILIES[name]
    raise ArgumentError(explain("model_type", repr(config.model_type), served_types()))


def served_types() -> str:
    """List the supported model types."""
    return f"one of {', '.join(FAMILIES)}"


def problem_of(module: Any, family: Family) -> str | None:
    """Name the unexpected parts of a module of this version of transformers."""
    version = tuple(int(x) for x in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        return "it is too old"
    parameters = inspect.signature(_forward_of(module)).parameters
    needed = {"hidden_states", "attention_mask"} | (set() if family.rope == "none" else {"position_embeddings"})
    if missing := sorted(needed - set(parameters)):
        return f"{type(module).__name__}.forward has no {missing[0]}"
    if not {"cache", "past_key_values"} & set(parameters):
        return f"{type(module).__name__}.forward has no cache"
    names = [*_COMMON, "q_proj" if getattr(module, "q_lora_rank", None) is None else "q_b_proj"]
    if missing := [name for name in names if not hasattr(module, name)]:
        return f"{type(module).__name__} has no {missing[0]}"
    functions = {
        "interleaved": "apply_rotary_pos_emb_interleave",
        "halves": "apply_rotary_pos_emb",
        "complex": "apply_rotary_emb",
    }
    name = functions.get(family.rope_of(module.config))
    if name and not hasattr(sys.modules[type(module).__module__], name):
        return f"{type(module).__module__} has no {name}"
    return None


def attach(module: nn.Module, *, reference: bool = False) -> None:
    """Serve a module from its next call on, if it can be served."""
    config: Any = module.config
    family = FAMILIES.get(config.model_type)
    if family is None or type(module).__name__ != family.attention or _is_served(module):
        return
    if problem := problem_of(module, family):
        logger.warning("mla_cupy: %s; the stock code computes the attention", problem)
        return
    group = group_of(config)
    if group is None:
        group = Group(family, reference)
        group.register(config)
    layer: Any = module.layer_idx
    group.modules[layer] = module
    group.reference = group.reference or reference
    setattr(module, _place_of(module), Served(module, family, group, _forward_of(module)))


def _detach(module: nn.Module) -> None:
    place = _place_of(module)
    served = module.__dict__.get(place)
    if isinstance(served, Served):
        if place == "forward" and getattr(served.original, "__func__", None) is type(module).forward:
            delattr(module, place)
        else:
            setattr(module, place, served.original)
        forget(module.config)


def _is_served(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get(_place_of(module)), Served)


def _place_of(module: nn.Module) -> str:
    """The attribute to replace: accelerate's hooks call the former forward method from theirs."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _forward_of(module: nn.Module) -> Any:
    return getattr(module, _place_of(module))


def attention_modules(model: nn.Module, family: Family) -> Iterator[nn.Module]:
    return (module for module in model.modules() if type(module).__name__ == family.attention)


def _family_of_served(config: Any) -> Family | None:
    group = group_of(config)
    return None if group is None else group.family


register(_family_of_served, attach)
