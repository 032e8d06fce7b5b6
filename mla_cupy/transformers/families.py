"""Model types of transformers with MLA: their differences, and the kernels for their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: Head sizes (q and k, v) of un-absorbed attention.
_PREFILL = {(192, 128), (256, 256), (128, 128)}
#: Latent and RoPE columns of keys in dense decode.
_DECODE = {(512, 64), (256, 64), (256, 32)}
#: Sizes of a head without RoPE that `mla_prepare` multiplies by W_UK.
_FUSED = {64, 128, 192, 256}


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of a family.

    Attributes
    ----------
    rope : str
        Pairs that RoPE turns.
    rope_first : bool
        RoPE columns come before the others.
    """

    rope: Literal["interleaved", "halves"]
    rope_first: bool = True


#: The indexer that `add_indexer` gives a layer: DeepSeek-V3.2's.
ADDED = Indexer("halves")


@dataclass(frozen=True)
class Family:
    """One model type.

    Attributes
    ----------
    attention : str
        Class of the attention module.
    rope : str
        How the stock code turns queries and keys: "interleaved" pairs (2i, 2i + 1), returned as halves; "halves";
        "config" for one of these by `rope_interleave`; "complex", which leaves pairs where they are; or "none".
    q_factor : str, optional
        Factor of the queries: "lora" (LongCat's factors of both LoRA ranks) or "llama4" (by position).
    indexer : Indexer, optional
        For DeepSeek sparse attention.
    """

    attention: str
    rope: Literal["interleaved", "halves", "config", "complex", "none"] = "config"
    q_factor: Literal["lora", "llama4"] | None = None
    indexer: Indexer | None = None

    def rope_of(self, config: Any) -> str:
        """`rope` with "config" resolved."""
        if self.rope != "config":
            return self.rope
        return "interleaved" if config.rope_interleave else "halves"


FAMILIES: dict[str, Family] = {
    "axk1": Family("AXK1Attention"),
    "deepseek_v2": Family("DeepseekV2Attention", rope="complex"),
    "deepseek_v3": Family("DeepseekV3Attention"),
    "deepseek_v32": Family("DeepseekV32Attention", rope="interleaved", indexer=Indexer("halves")),
    "glm4_moe_lite": Family("Glm4MoeLiteAttention"),
    "glm_moe_dsa": Family("GlmMoeDsaAttention", rope="interleaved", indexer=Indexer("interleaved")),
    "hy_v4": Family("HYV4Attention", rope="halves", indexer=Indexer("halves", rope_first=False)),
    "kimi_linear": Family("KimiLinearAttention", rope="none"),
    "longcat_flash": Family("LongcatFlashMLA", rope="interleaved", q_factor="lora"),
    "minicpm3": Family("MiniCPM3Attention", rope="halves"),
    "mistral4": Family("Mistral4Attention", q_factor="llama4"),
    "youtu": Family("YoutuAttention"),
}

#: Model types with latent attention that are not served, and why.
DECLINED: dict[str, str] = {
    "axk2": "no kernel reads latents of 128 columns",
    "deepseek_v4": "its attention compresses tokens (`sparse_mla_decode` reads its records)",
    "glm5_next": "its indexer pools keys",
}


@dataclass(frozen=True)
class Sizes:
    """Head sizes of a model.

    Attributes
    ----------
    nope, rope, v, latent : int
        Columns of a query head without RoPE and with it, of a value head, and of the latent.
    """

    nope: int
    rope: int
    v: int
    latent: int

    @staticmethod
    def of(config: Any) -> Sizes:
        """Read a configuration, or an attention module."""
        return Sizes(config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank)

    @property
    def key(self) -> int:
        """Columns of a cached token."""
        return self.latent + self.rope

    @property
    def prefills(self) -> bool:
        """True if a kernel attends to expanded keys of this size."""
        return self.rope == 64 and (self.nope + self.rope, self.v) in _PREFILL

    @property
    def decodes(self) -> bool:
        """True if a kernel attends to latents of this size."""
        return (self.latent, self.rope) in _DECODE

    @property
    def is_sparse(self) -> bool:
        """True if the sparse kernels read latents of this size."""
        return (self.latent, self.rope) == (512, 64)

    @property
    def is_fused(self) -> bool:
        """True if one launch prepares queries and keys for decode."""
        return self.is_sparse and self.nope in _FUSED and self.v in _FUSED


def model_types(config: Any) -> list[tuple[str, Any]]:
    """(model_type, text configuration) of a configuration: of itself, and of the one that it nests."""
    text = config.get_text_config(decoder=True)
    found = [(config.model_type, config)]
    return found if text is config else [*found, (text.model_type, text)]
