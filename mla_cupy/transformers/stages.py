"""An indexer for a dense model, and the two stages that train it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.transformers.families import Family, Sizes
from mla_cupy.transformers.group import Group, group_of
from mla_cupy.transformers.learning import Learning
from mla_cupy.transformers.patching import attention_modules, family_of

_MOST = {"index_n_heads": 128, "index_topk": 8192}
_WIDTHS = (64, 128)


class StageLoss(NamedTuple):
    """Result of a forward pass of a stage.

    Attributes
    ----------
    loss : tensor
        The loss to differentiate.
    kl : tensor, (layers,)
        Mean divergence of each layer's indexer from the attention.
    coverage : tensor, (layers,), optional
        Share of the attention that each layer's selection covers.
    output : ModelOutput
        The model's own output.
    """

    loss: torch.Tensor
    kl: torch.Tensor
    coverage: torch.Tensor | None
    output: Any


def add_indexer(model: Any, *, index_n_heads: int = 64, index_head_dim: int = 128, index_topk: int = 2048) -> Any:
    """Add DeepSeek-V3.2's lightning indexer, with random weights, to each attention layer of a dense model.

    Parameters
    ----------
    model : PreTrainedModel
        A model of a dense family with latents of 512 + 64 columns: deepseek_v2, deepseek_v3, youtu, longcat_flash, axk1
        or glm4_moe_lite. It may be patched.
    index_n_heads : int
        1 to 128.
    index_head_dim : int
        64 or 128.
    index_topk : int
        Tokens that a query selects, 1 to 8192.

    Returns
    -------
    PreTrainedModel
        The same model. Its configuration also stores the three sizes.

    Raises
    ------
    ArgumentError
        If the model or a size does not fit; nothing has changed.

    Notes
    -----
    Names, shapes and arithmetic follow transformers' deepseek_v32: `indexer.wq_b`, `wk`, `k_norm` and `weights_proj`,
    which is float32. A deepseek_v3 model with an indexer has the state dict of a deepseek_v32 model. In a model without
    `q_lora_rank`, such as DeepSeek-V2-Lite, `wq_b` reads the hidden states.

    The model attends to all tokens until `patch(model, sparse=True)`. To load weights saved with an indexer, call
    `add_indexer` before `load_state_dict`: `from_pretrained` drops them.

    Examples
    --------
    >>> add_indexer(model, index_n_heads=8, index_head_dim=64, index_topk=512)  # doctest: +SKIP
    """
    family = family_of(model.config)
    modules = list(attention_modules(model, family))
    _check(family, modules, {"index_n_heads": index_n_heads, "index_topk": index_topk}, index_head_dim)
    for module in modules:
        sizes = {"index_n_heads": index_n_heads, "index_head_dim": index_head_dim, "index_topk": index_topk}
        for name, size in sizes.items():
            setattr(module.config, name, size)
        module.indexer = _indexer(module, sizes)
    return model


def _check(family: Family, modules: list[Any], counts: dict[str, int], width: int) -> None:
    if not modules or family.indexer or hasattr(modules[0], "indexer"):
        raise ArgumentError(explain("model", "an indexer in it" if modules else "no MLA in it", "a dense MLA model"))
    if family.rope == "none":
        raise ArgumentError(explain("model", "keys without RoPE", "a family whose indexer can turn them"))
    sizes = Sizes.of(modules[0])
    if not sizes.is_sparse or not sizes.prefills:
        raise ArgumentError(explain("head sizes", str(sizes), "latents of 512 + 64 columns, and heads of the kernels"))
    for name, count in counts.items():
        if not 1 <= count <= _MOST[name]:
            raise ArgumentError(explain(name, count, f"1 to {_MOST[name]}"))
    if width not in _WIDTHS:
        raise ArgumentError(explain("index_head_dim", width, "64 or 128"))


def _indexer(module: Any, sizes: dict[str, int]) -> nn.Module:
    """A stock indexer, like the module's weights."""
    config, weight = module.config, module.kv_b_proj.weight
    hidden = config.hidden_size
    rank = getattr(module, "q_lora_rank", None) or hidden
    shapes = {"hidden_size": hidden, "q_lora_rank": rank, "qk_rope_head_dim": module.qk_rope_head_dim, **sizes}
    made = DeepseekV32Indexer(SimpleNamespace(**shapes), module.layer_idx).to(weight.device, weight.dtype)
    made.weights_proj.float()
    for projection in (made.wq_b, made.wk, made.weights_proj):
        nn.init.normal_(projection.weight, std=config.initializer_range)
    return made


def indexer_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a model's indexers, which the warm-up trains.

    Parameters
    ----------
    model : nn.Module

    Examples
    --------
    >>> model.requires_grad_(False)  # doctest: +SKIP
    >>> for parameter in indexer_parameters(model):  # doctest: +SKIP
    ...     parameter.requires_grad_(True)
    """
    return (p for name, p in model.named_parameters() if ".indexer." in name)


def indexer_warmup(model: Any, *, tokens: int | None = None, coverage: bool = False, **inputs: Any) -> StageLoss:
    """Run a forward pass of the warm-up: the model attends to all tokens, and the indexers learn from it.

    The loss is the sum over layers of the mean over tokens of KL(p || softmax(I)), where p is the layer's attention,
    summed over its heads and normalised, and I are the indexer's scores.

    Parameters
    ----------
    model : PreTrainedModel
        A model after `add_indexer` and `patch(model)`. It may be wrapped, or be the model below the head, which saves
        the logits.
    tokens : int, optional
        Divisor of the losses: for gradient accumulation the tokens of all micro-batches. Default: the tokens of the
        batch, without padding.
    coverage : bool
        Measure the share of the attention that each indexer's top-k covers, over queries with more than top-k tokens:
        for validation, under `torch.no_grad()`.
    **inputs
        Arguments of the model, such as `input_ids`, and `attention_mask` for padding or `position_ids` that restart for
        packed sequences.

    Returns
    -------
    StageLoss

    Raises
    ------
    ArgumentError
        If the model is not patched, has no indexer or attends sparsely, or the kernels do not support the call.

    Notes
    -----
    The loss reaches the indexers alone, because their inputs are detached. Freeze all other parameters first, or the
    pass stores activations for nothing: see `indexer_parameters`.
    """
    return _run(model, sparse=False, learning=Learning(tokens, coverage), inputs=inputs)


def sparse_training(model: Any, *, tokens: int | None = None, indexer_weight: float = 1.0, **inputs: Any) -> StageLoss:
    """Run a forward pass of sparse training: the model attends to the selected tokens, and model and indexers learn.

    The loss is the model's, plus `indexer_weight` times the sum over layers of the mean over tokens of the same
    divergence as in the warm-up, over the selected tokens.

    Parameters
    ----------
    model : PreTrainedModel
        A model after `patch(model, sparse=True)`, or of a type with its own indexer. It may be wrapped.
    tokens : int, optional
        Divisor of the indexers' losses, as for `indexer_warmup`.
    indexer_weight : float
        Factor of the indexers' losses. With Adam it affects gradient clipping only.
    **inputs
        Arguments of the model, with `labels`.

    Returns
    -------
    StageLoss

    Raises
    ------
    ArgumentError
        If the model is not patched, has no indexer or attends to all tokens, or the kernels do not support the call.

    Notes
    -----
    The indexers' inputs are detached, and the selection passes no gradient, as in DeepSeek-V3.2's report: the model's
    loss reaches everything except the indexers, and the indexers' loss reaches the indexers alone.
    """
    found = _run(model, sparse=True, learning=Learning(tokens), inputs=inputs)
    if found.output.loss is None:
        raise ArgumentError(explain("inputs", "no labels", "labels, for the model's loss"))
    return found._replace(loss=found.output.loss + indexer_weight * found.loss)


def _run(model: Any, *, sparse: bool, learning: Learning, inputs: dict[str, Any]) -> StageLoss:
    groups = _groups(model, sparse)
    for group in groups:
        group.learning = learning
    try:
        output = model(**{"use_cache": False, **inputs})
    finally:
        learning.is_open = False
    if torch.is_grad_enabled() and any(p.requires_grad for p in indexer_parameters(model)):
        _check_recorded(learning)
    coverage = torch.stack(learning.coverage) if learning.coverage else None
    return StageLoss(torch.stack(learning.losses).sum(), torch.stack(learning.kl), coverage, output)


def _check_recorded(learning: Learning) -> None:
    if not all(loss.requires_grad for loss in learning.losses):
        remedy = "pass use_reentrant=False to gradient_checkpointing_enable"
        raise ArgumentError(explain("model", "layers without gradients", "losses with gradients", remedy))


def _groups(model: nn.Module, sparse: bool) -> list[Group]:
    """The groups of a model's attention modules, which must have indexers."""
    found = {id(g): g for m in model.modules() if (g := group_of(getattr(m, "config", None)))}
    remedy = f"call add_indexer(model, ...), then patch(model, sparse={sparse})"
    if not found or not any(".indexer." in name for name, _ in model.named_parameters()):
        raise ArgumentError(explain("model", type(model).__name__, "a patched model with an indexer", remedy))
    if any(group.sparse != sparse for group in found.values()):
        got, expected = ("all", "selected") if sparse else ("selected", "all")
        raise ArgumentError(explain("model", f"attention to {got} tokens", f"attention to {expected} tokens", remedy))
    return list(found.values())
