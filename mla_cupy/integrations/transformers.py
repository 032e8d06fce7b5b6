"""`mla-cupy transformers check`: which parts of a model will be served, before its weights are loaded."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.terminal import Help, show, table

_EPILOG = """\
examples:
  mla-cupy transformers check deepseek-ai/DeepSeek-V2-Lite   a model on the Hub, or in a directory
  mla-cupy transformers check glm4_moe_lite                  a model type, with its default sizes
  mla-cupy transformers check all                            every model type with latent attention
"""


class Answer(NamedTuple):
    """The fate of one use of a model.

    Attributes
    ----------
    use : str
    served : bool
    how : str
        The operations, or why the stock code computes it.
    """

    use: str
    served: bool
    how: str


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `mla-cupy transformers`."""
    command.epilog = _EPILOG
    command.formatter_class = Help
    command.add_argument("what", choices=["check"], help="say what `mla_cupy.transformers.patch` will serve")
    command.add_argument("model", metavar="MODEL", help="a model, a directory, a config.json, a model type, or all")


def run(options: argparse.Namespace) -> int:
    """Answer for one model, or for all types; returns 1 if nothing of a model is served."""
    try:
        from mla_cupy.transformers.families import DECLINED, FAMILIES
    except ImportError as error:
        expected = "transformers 5.17 or newer, and PyTorch"
        raise ArgumentError(explain("transformers", str(error), expected, "pip install torch transformers")) from error

    names = [*FAMILIES, *DECLINED] if options.model == "all" else [options.model]
    found = {name: check(config_of(name)) for name in names}
    if options.json:
        print(json.dumps({name: [answer._asdict() for answer in answers] for name, answers in found.items()}, indent=1))
    else:
        rows = [(name, a.use, "yes" if a.served else "no", a.how) for name, answers in found.items() for a in answers]
        show(table("attention by mla_cupy", ("model", "use", "served", "how, or why not"), rows))
    return 0 if all(any(a.served for a in found[name]) for name in names) or options.model == "all" else 1


def config_of(model: str) -> Any:
    """The configuration of a model, a directory, a file, or a model type.

    Raises
    ------
    ArgumentError
        If there is none.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if model in CONFIG_MAPPING and not Path(model).exists():
        return CONFIG_MAPPING[model]()
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        expected = "a model, a directory, a config.json or a model type that transformers knows"
        raise ArgumentError(explain("MODEL", repr(model), expected, str(error).splitlines()[0])) from error


def check(config: Any) -> list[Answer]:
    """Report the parts of a model with this configuration that `patch` serves.

    Parameters
    ----------
    config : PreTrainedConfig

    Returns
    -------
    list of Answer
    """
    from mla_cupy.transformers.families import Sizes, model_types
    from mla_cupy.transformers.patching import family_of, problem_of

    try:
        family = family_of(config)
        text = next(text for name, text in model_types(config) if name and hasattr(text, "kv_lora_rank"))
        module = _module(text, family.attention)
    except (ArgumentError, ImportError) as error:
        return [Answer("all", False, str(error))]
    if problem := problem_of(module, family):
        return [Answer("all", False, problem)]
    sizes = Sizes.of(text)
    if family.indexer:
        whole = Answer("prefill and training", True, "indexer_select, sparse_mla_forward and its gradient")
        steps = Answer("decode", True, "indexer_select, sparse_mla_forward over latents of 512 + 64 columns")
    else:
        heads = f"heads of {sizes.nope + sizes.rope} and {sizes.v} columns"
        how = f"mla_prefill and its gradient, {heads}" if sizes.prefills else f"no kernel has {heads}"
        whole = Answer("prefill and training", sizes.prefills, how)
        latents = f"latents of {sizes.latent} + {sizes.rope} columns"
        steps = Answer(
            "decode", sizes.decodes, f"mla_decode over {latents}" if sizes.decodes else f"no kernel has {latents}"
        )
    why = "LatentCache(kv_format='v32')" if sizes.is_sparse else "the format has latents of 512 + 64 columns"
    return [whole, steps, Answer("FP8 tokens", sizes.is_sparse, why)]


def _module(config: Any, attention: str) -> Any:
    """An attention module without memory."""
    import torch

    file = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    layer = kinds.index("full_attention") if "full_attention" in kinds else 0
    with torch.device("meta"):
        return getattr(file, attention)(config, layer)
