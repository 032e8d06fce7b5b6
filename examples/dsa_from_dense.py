"""Train a small MLA model, teach it a lightning indexer, continue sparse.

    python examples/dsa_from_dense.py --quick                      # a tiny model, a minute on a CPU
    python examples/dsa_from_dense.py --out run --budget 25        # all stages on one GPU
    python examples/dsa_from_dense.py --out run --stage warmup     # one stage; run it again to continue it

The model reads bytes: Python's own sources and documentation, segments that are repeated, and facts that are asked for
later. Its stages, each of which leaves weights (NAME.pt) and rows of measurements (NAME.jsonl) in --out:

    dense     trains the model with attention to all tokens
    warmup    freezes it and trains an indexer for each layer, from that attention
    sparse    trains both with attention to the selected tokens
    control   trains the dense model for the same number of steps as `sparse`
    compare   repeats some steps with losses in plain PyTorch: the curves coincide
    measure   validation losses, facts found, times of steps, memory; generates with sparse decode
    layer     times one layer of DeepSeek-V3.2's size: the warm-up's loss, and FlashAttention (needs a GPU)
    plot      draws run.svg from the rows (needs matplotlib)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import mla_cupy.torch as mla
from mla_cupy.transformers import add_indexer, indexer_parameters, indexer_warmup, patch, sparse_training, unpatch

VOCABULARY, SEGMENT, REPEAT, IGNORED = 512, 256, 257, -100  # the first 256 tokens are bytes
SUBJECTS, VALUES = 14, 16  # a token for each question, each answer, and each fact
ASKED, ANSWER, TOLD = 258, 258 + SUBJECTS, 258 + SUBJECTS + VALUES
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {"text": 0.3, "copy": 0.1, "recall": 0.6}
# Parts of --budget. No command takes longer than ten minutes with a budget of 25.
SHARES = {
    "dense": 0.38,
    "warmup": 0.08,
    "sparse": 0.28,
    "control": 0.06,
    "compare": 0.03,
    "measure": 0.12,
    "layer": 0.05,
}


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its training; `steps` are the most of each stage."""

    length: int = 4096
    batch: int = 8
    topk: int = 512
    hidden: int = 512
    layers: int = 6
    heads: int = 16
    q_rank: int = 384
    inner: int = 1536
    index_heads: int = 8
    rate: float = 1e-3
    rate_of_indexers: float = 2e-3
    steps: dict[str, int] = field(
        default_factory=lambda: {"dense": 8000, "warmup": 1200, "sparse": 3000, "compare": 20}
    )
    early: dict[int, int] = field(default_factory=lambda: {16: 600, 4: 900})  # steps with short rows teach copying
    every: int = 50
    rows: int = 16  # of a validation set
    needles: int = 64
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)


QUICK = Size(
    length=128,
    batch=4,
    topk=16,
    hidden=128,
    layers=2,
    heads=2,
    q_rank=64,
    inner=256,
    index_heads=4,
    rate=4e-3,
    rate_of_indexers=1e-2,
    steps={"dense": 150, "warmup": 30, "sparse": 8, "compare": 2},
    early={},
    every=25,
    rows=4,
    needles=4,
    lengths=(64, 128),
)


@dataclass
class Run:
    """Choices of the command line."""

    size: Size
    out: Path
    budget: float | None
    losses: str
    seed: int

    def rows(self, stage: str) -> list[dict[str, Any]]:
        """Measurements of a stage that has run."""
        path = self.out / f"{stage}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def write(self, stage: str, rows: Iterable[dict[str, Any]]) -> None:
        """Replace them."""
        lines = (json.dumps({"stage": stage, **row}) for row in rows)
        (self.out / f"{stage}.jsonl").write_text("".join(f"{line}\n" for line in lines))


# ---- Data: each step's batch depends on the seed and on its number alone -----------------------------------------


@functools.cache
def corpus() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], str]:
    """Bytes to learn and bytes to validate, chosen by the hash of a file's name; and the hash of all."""
    import pydoc_data.topics

    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    texts = {f"topic {name}": text.encode() for name, text in pydoc_data.topics.topics.items()}
    for path in sorted(root.rglob("*.py")):
        if not left_out & set(path.relative_to(root).parts):
            texts[str(path.relative_to(root))] = path.read_bytes()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, text in texts.items():
        parts[hashlib.sha256(name.encode()).digest()[0] % 16 == 0].append(text)
    learned, validated = (b"\n".join(part) for part in parts)
    found = (np.frombuffer(part, np.uint8).astype(np.int64) for part in (learned, validated))
    return *found, hashlib.sha256(learned + validated).hexdigest()  # type: ignore[return-value]


def text_row(rng: np.random.Generator, text: np.ndarray[Any, Any], n: int) -> tuple[Any, Any]:
    """A piece of a text to predict as a whole."""
    at = rng.integers(len(text) - n)
    return text[at : at + n], text[at : at + n]


def copy_row(rng: np.random.Generator, text: np.ndarray[Any, Any], n: int) -> tuple[Any, Any]:
    """Random segments that repeat; the repeats are to be predicted."""
    ids: list[Any] = []
    labels: list[Any] = []
    while len(ids) < n:
        m = int(np.exp(rng.uniform(np.log(8), np.log(n / 2))))
        segment = rng.integers(33, 127, m).tolist()
        ids += [SEGMENT, *segment, REPEAT, *segment]
        labels += [IGNORED] * (m + 2) + segment
    return np.array(ids[:n]), np.array(labels[:n])


def recall_row(rng: np.random.Generator, text: np.ndarray[Any, Any], n: int) -> tuple[Any, Any]:
    """A text with facts, each one token for a subject and its value; questions for subjects, and their answers."""
    filler, _ = text_row(rng, text, n)
    values, new = rng.integers(VALUES, size=SUBJECTS), rng.permutation(SUBJECTS).tolist()
    ids: list[Any] = []
    labels: list[Any] = []
    known: list[int] = []
    gap = int(4 * (n / 64) ** rng.random())
    while len(ids) < n:
        if new and (not known or rng.random() < 0.4):
            known.append(new.pop())
            ids += [TOLD + known[-1] * VALUES + values[known[-1]]]
            labels += [IGNORED]
        else:
            subject = known[rng.integers(len(known))]
            ids += [ASKED + subject, ANSWER + values[subject]]
            labels += [IGNORED, ANSWER + values[subject]]
        piece = filler[len(ids) : len(ids) + int(rng.integers(gap))].tolist()
        ids += piece
        labels += [IGNORED] * len(piece)
    return np.array(ids[:n]), np.array(labels[:n])


def needle_prompt(rng: np.random.Generator, text: np.ndarray[Any, Any], n: int) -> tuple[Any, Any]:
    """Text of n bytes with up to eight facts at random places, and a question for one of them; and its answer."""
    subjects = rng.permutation(SUBJECTS)[: min(8, n // 16)]
    values = rng.integers(VALUES, size=len(subjects))
    filler, _ = text_row(rng, text, n - len(subjects) - 1)
    facts = TOLD + subjects * VALUES + values
    mixed = np.insert(filler, np.sort(rng.integers(0, len(filler), len(subjects))), facts)
    asked = int(rng.integers(len(subjects)))
    return np.append(mixed, ASKED + subjects[asked]), np.array([ANSWER + values[asked]])


ROWS = {"text": text_row, "copy": copy_row, "recall": recall_row}


class Batches(torch.utils.data.Dataset):  # type: ignore[misc]
    """Batches by their numbers: tokens and labels."""

    def __init__(self, run: Run, kinds: dict[str, float] = KINDS, validates: bool = False, stage: str = "") -> None:
        self.size, self.kinds, self.validates = run.size, kinds, validates
        self.seed = [run.seed, validates, *(stage or "validation").encode()]
        self.early = run.size.early if stage == "dense" else {}

    def parts(self, number: int) -> int:
        """Rows of a batch for each row of full length."""
        return next((parts for parts, steps in self.early.items() if number < steps), 1)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng, text = np.random.default_rng([*self.seed, number]), corpus()[self.validates]
        parts = self.parts(number)
        kinds = rng.choice(list(self.kinds), parts * self.size.batch, p=list(self.kinds.values()))
        rows = [ROWS[kind](rng, text, self.size.length // parts) for kind in kinds]
        ids, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return ids, labels


def batches(run: Run, stage: str, steps: Iterable[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a stage on the device; other processes make them."""
    workers = 4 if DEVICE == "cuda" else 0
    corpus()  # before the processes begin
    loader = torch.utils.data.DataLoader(
        Batches(run, stage=stage), sampler=list(steps), batch_size=None, num_workers=workers, pin_memory=bool(workers)
    )
    for ids, labels in loader:
        yield ids.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)


# ---- Model and optimiser ------------------------------------------------------------------------------------------


def new_model(run: Run) -> Any:
    """A DeepSeek-V3 without experts, in bfloat16."""
    size = run.size
    torch.manual_seed(run.seed)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        first_k_dense_replace=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        q_lora_rank=size.q_rank,
        max_position_embeddings=2 * max(size.lengths),
        bos_token_id=None,
        eos_token_id=None,
    )
    return DeepseekV3ForCausalLM(config).to(DEVICE, torch.bfloat16)


def load(run: Run, name: str, *, sparse: bool = False) -> Any:
    """The model that a stage has left, with dense or sparse attention."""
    model = new_model(run)
    path = run.out / f"{name}.pt"
    if not path.exists():
        sys.exit(f"{path}: missing; run --stage {name} first")
    weights = torch.load(path, map_location=DEVICE, weights_only=True)
    has_indexers = any(".indexer." in key for key in weights)
    if has_indexers:
        indexed(run, model)
    model.load_state_dict(weights)
    if sparse and not has_indexers:
        indexed(run, model)  # random ones
    return patch(model, sparse=sparse, reference=True)


def indexed(run: Run, model: Any) -> Any:
    """The model with new indexers."""
    torch.manual_seed(run.seed + 1)
    return add_indexer(model, index_n_heads=run.size.index_heads, index_head_dim=128, index_topk=run.size.topk)


class Masters:
    """AdamW on float32 copies of bfloat16 weights; gradients of micro-batches are added up in float32."""

    def __init__(self, groups: list[tuple[list[Any], float]]) -> None:
        self.weights = [weights for weights, _ in groups]
        self.copies = [[w.detach().float().clone() for w in weights] for weights in self.weights]
        self.rates = [rate for _, rate in groups]
        parts = [{"params": copies} for copies in self.copies]
        self.adam = torch.optim.AdamW(parts, betas=(0.9, 0.95), weight_decay=0.01)

    def accumulate(self) -> None:
        """Add the weights' gradients to the copies' gradients."""
        for weights, copies in zip(self.weights, self.copies, strict=True):
            for weight, copy in zip(weights, copies, strict=True):
                if weight.grad is not None:
                    grad, weight.grad = weight.grad.float(), None
                    copy.grad = grad if copy.grad is None else copy.grad.add_(grad)

    def step(self, factor: float) -> None:
        """Change the copies by `factor` times the groups' rates, and the weights with them."""
        for part, rate in zip(self.adam.param_groups, self.rates, strict=True):
            part["lr"] = factor * rate
            torch.nn.utils.clip_grad_norm_(part["params"], 1.0)
        self.adam.step()
        self.adam.zero_grad()
        self.write()

    def write(self) -> None:
        """Round the copies to the weights."""
        with torch.no_grad():
            for weights, copies in zip(self.weights, self.copies, strict=True):
                for weight, copy in zip(weights, copies, strict=True):
                    weight.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        return {"copies": self.copies, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for copies, saved in zip(self.copies, state["copies"], strict=True):
            for copy, value in zip(copies, saved, strict=True):
                copy.copy_(value)
        self.adam.load_state_dict(state["adam"])
        self.write()


def groups_of(run: Run, model: Any) -> list[tuple[list[Any], float]]:
    """Weights that are trained, and their rates: the model's own, and the indexers'."""
    indexers = {id(p) for p in indexer_parameters(model)}
    trained = [p for p in model.parameters() if p.requires_grad]
    own, others = ([p for p in trained if (id(p) in indexers) is learns] for learns in (False, True))
    return [(weights, rate) for weights, rate in ((own, run.size.rate), (others, run.size.rate_of_indexers)) if weights]


# ---- Training -----------------------------------------------------------------------------------------------------

_PROBED, _SAVED = 10, 60.0  # steps before a step is timed; seconds between two checkpoints


@dataclass
class Stage:
    """A stage that is being trained.

    Attributes
    ----------
    loss_of : callable
        (ids, labels) -> the loss.
    observe : callable
        () -> what a row says of the validation set.
    rate : callable
        (step, steps) -> factor of the rates.
    data : str
        Name of the batches. Default: the stage's.
    """

    name: str
    model: Any
    masters: Masters
    loss_of: Callable[[Any, Any], torch.Tensor]
    observe: Callable[[], dict[str, Any]]
    rate: Callable[[int, int], float]
    data: str = ""
    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    probed: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def advance(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One step of the optimiser; the loss before it."""
        loss = self.loss_of(ids, labels)
        loss.backward()
        self.masters.accumulate()
        self.masters.step(self.rate(self.step, self.steps))
        self.step += 1
        return loss.detach()

    def save(self, path: Path) -> None:
        """Write what `resume` reads: float32 copies and the optimiser's state, which stay on this machine."""
        state = {x: getattr(self, x) for x in ("step", "steps", "seconds", "probed", "rows")}
        torch.save({"masters": self.masters.state_dict(), **state}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def resume(self, path: Path) -> None:
        """Continue where `save` was called."""
        state = torch.load(path, map_location=DEVICE, weights_only=True)
        self.masters.load_state_dict(state.pop("masters"))
        for name, value in state.items():
            setattr(self, name, value)


def train(run: Run, stage: Stage, most: int, seconds: float | None) -> None:
    """Train for `most` steps, or until the time is over; leave weights and rows."""
    checkpoint, stage.steps = run.out / f"{stage.name}.resume.pt", most
    if checkpoint.exists():
        stage.resume(checkpoint)
    else:
        stage.rows.append({"step": 0, **stage.observe()})
    began, saved = time.monotonic() - stage.seconds, time.monotonic()
    text = TextColumn("{task.description} {task.completed}/{task.total}: loss {task.fields[loss]:.3f}")
    with Progress(text, BarColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task(stage.name, total=stage.steps, completed=stage.step, loss=np.nan)
        for ids, labels in batches(run, stage.data or stage.name, range(stage.step, most)):
            loss = stage.advance(ids, labels)
            if stage.step % run.size.every == 0 or stage.step == stage.steps:
                stage.rows.append({"step": stage.step, "loss": float(loss), **stage.observe()})
                progress.console.print(line_of(stage.name, stage.rows[-1]))
                progress.update(bar, loss=float(loss))
            stage.seconds = time.monotonic() - began
            if seconds:
                plan(stage, most, seconds, run.size.every)
            progress.update(bar, completed=stage.step, total=stage.steps)
            if stage.step >= stage.steps:
                break
            if time.monotonic() - saved > _SAVED:
                stage.save(checkpoint)
                saved = time.monotonic()
    torch.save(stage.model.state_dict(), run.out / f"{stage.name}.pt")
    facts = {"steps": stage.steps, "seconds": stage.seconds, "peak_bytes": peak_bytes(), "corpus": corpus()[2]}
    run.write(stage.name, [*stage.rows, facts])
    checkpoint.unlink(missing_ok=True)


def plan(stage: Stage, most: int, seconds: float, timed: int) -> None:
    """Fix the number of steps after some have been timed; the first ones compile kernels, and say too little."""
    if stage.step == _PROBED:
        finish_gpu()
        stage.probed = stage.seconds
    elif stage.step == _PROBED + timed:
        finish_gpu()
        each = (stage.seconds - stage.probed) / timed
        stage.steps = min(most, stage.step + max(1, int((seconds - stage.seconds) / each)))


def finish_gpu() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """Most memory that PyTorch has used on the GPU."""
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def line_of(stage: str, row: dict[str, Any]) -> str:
    """A row for a reader: lists as their means."""
    means = {name: float(np.mean(x)) if isinstance(x, list) else x for name, x in row.items()}
    return f"{stage}: " + ", ".join(f"{name} {x:.4g}" for name, x in means.items() if isinstance(x, (int, float)))


def warm_cosine(step: int, steps: int) -> float:
    """A rise over a hundred steps, then a cosine down to a twentieth."""
    return min(1.0, (step + 1) / min(100, steps / 20)) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def late_decay(step: int, steps: int) -> float:
    """A tenth, which shrinks to nearly nothing."""
    return 0.1 * (1 - 0.95 * step / steps)


# ---- What is measured on the validation set -----------------------------------------------------------------------


def validation(run: Run, kind: str, count: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of one kind, of files that no stage trains on."""
    made = Batches(run, {kind: 1.0}, validates=True)
    for number in range(count):
        ids, labels = made[number]
        yield ids.to(DEVICE), labels.to(DEVICE)


@torch.no_grad()
def validation_losses(run: Run, model: Any, count: int = 1) -> dict[str, float]:
    """Mean losses of text, and of facts that are asked for."""
    found = {}
    for kind in ("text", "recall"):
        losses = [model(input_ids=i, labels=x, use_cache=False).loss for i, x in validation(run, kind, count)]
        found[kind] = float(torch.stack(losses).mean())
    return found


@torch.no_grad()
def indexer_quality(run: Run, model: Any) -> dict[str, list[float]]:
    """Divergence from the attention, and the share of it that the top-k cover, by layer."""
    found = {}
    for kind in ("text", "recall"):
        ids, _ = next(validation(run, kind))
        of = indexer_warmup(model, input_ids=ids, coverage=True)
        found[f"kl_{kind}"], found[f"coverage_{kind}"] = of.kl.tolist(), of.coverage.tolist()
    return found


@torch.no_grad()
def needle_accuracy(run: Run, model: Any, n: int) -> float:
    """Share of facts that greedy decode from the paged cache finds in contexts of n bytes."""
    rng, right = np.random.default_rng([run.seed, n]), 0
    for _ in range(run.size.needles // run.size.rows):
        prompts = [needle_prompt(rng, corpus()[1], n) for _ in range(run.size.rows)]
        ids, answers = (torch.from_numpy(np.stack(part)).to(DEVICE) for part in zip(*prompts, strict=True))
        found = generate(model, ids, answers.shape[1])
        right += int((found[:, -answers.shape[1] :] == answers).all(1).sum())
    return right / run.size.needles


def generate(model: Any, ids: torch.Tensor, count: int) -> Any:
    """The most probable bytes, with a cache of latents."""
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)


# ---- The losses in plain PyTorch ----------------------------------------------------------------------------------

_PLAIN_ROWS = 512  # queries at a time


def plain_kl(q: Any, k: Any, index_q: Any, index_k: Any, weights: Any, seen: Any, scale: float) -> torch.Tensor:
    """Divergence of the indexer's softmax from the attention, summed over heads, over the keys that are seen."""
    scores = torch.einsum("qhd,khd->qhk", q.float(), k.float()) * scale
    p = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).mean(1).detach()
    products = torch.einsum("qhd,kd->qhk", index_q.float(), index_k.float()).relu()
    scores = torch.einsum("qh,qhk->qk", weights.float(), products) * (index_q.shape[1] * index_q.shape[2]) ** -0.5
    log = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    return (p * (p.clamp(min=1e-30).log() - log)).masked_fill(~seen, 0).sum(1)


def plain_objective(q: Any, k: Any, *scored: Any, scale: float, row_weights: Any, packed: Any = None, **of: Any) -> Any:
    """Stands in for both objectives of `mla_cupy.torch`: `scored` ends with the indices of the sparse one."""
    index_q, index_k, weights, *indices = scored
    if "q_rope" in of:
        k_rope = of["k_rope"][:, None].expand(-1, q.shape[1], -1)
        q, k = torch.cat([q, of["q_rope"]], -1), torch.cat([k, k_rope], -1)
    else:
        k = k[:, None].expand(-1, q.shape[1], -1)
    starts = [0, len(q)] if packed is None else packed.cu_seqlens_q.tolist()
    found = []
    for first, last in itertools.pairwise(starts):
        for a in range(first, last, _PLAIN_ROWS):
            b = min(last, a + _PLAIN_ROWS)
            seen = (
                torch.arange(b - first, device=q.device) <= torch.arange(a - first, b - first, device=q.device)[:, None]
            )
            if indices:
                rows = indices[0][a:b].long()
                chosen = torch.zeros(b - a, b - first + 1, dtype=torch.bool, device=q.device)
                seen = seen & chosen.scatter(1, rows.where(rows >= 0, b - first), True)[:, :-1]
            own, keys = slice(a, b), slice(first, b)
            found.append(plain_kl(q[own], k[keys], index_q[own], index_k[keys], weights[own], seen, scale))
    kl = torch.cat(found)
    return (kl * row_weights).sum(), kl.detach()


def objectives(losses: str) -> Any:
    """A context in which the indexers' losses are of these kernels, or plain PyTorch."""
    names = ("indexer_warmup_objective", "indexer_sparse_objective") if losses == "torch" else ()
    return mock.patch.multiple(mla, **dict.fromkeys(names, plain_objective)) if names else contextlib.nullcontext()


# ---- Stages -------------------------------------------------------------------------------------------------------


def _seconds(run: Run, stage: str) -> float | None:
    return None if run.budget is None else 60 * run.budget * SHARES[stage]


def dense(run: Run) -> None:
    """Attention to all tokens, from random weights."""
    model = new_model(run)
    if DEVICE == "cuda":  # on a CPU transformers' own attention is the faster one
        patch(model)
    _train_dense(run, "dense", model, warm_cosine, run.size.steps["dense"], _seconds(run, "dense"))


def control(run: Run) -> None:
    """Further steps of the dense model, equal in number to the sparse model's."""
    rows = run.rows("sparse")
    steps = rows[-1]["steps"] if rows else run.size.steps["sparse"]
    model = load(run, "dense")
    _train_dense(run, "control", model if DEVICE == "cuda" else unpatch(model), late_decay, steps, None)


def _train_dense(run: Run, name: str, model: Any, rate: Any, steps: int, seconds: float | None) -> None:
    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return model(input_ids=ids, labels=labels, use_cache=False).loss

    masters = Masters(groups_of(run, model))
    data = "sparse" if name == "control" else name
    stage = Stage(name, model, masters, loss_of, lambda: validation_losses(run, model), rate, data=data)
    train(run, stage, steps, seconds)


def warming(run: Run) -> Stage:
    """The dense model, frozen, with new indexers that learn its attention."""
    model = indexed(run, load(run, "dense"))
    model.requires_grad_(False)
    for parameter in indexer_parameters(model):
        parameter.requires_grad_(True)

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return indexer_warmup(model.model, input_ids=ids).loss  # without the head

    masters = Masters(groups_of(run, model))
    return Stage("warmup", model, masters, loss_of, lambda: indexer_quality(run, model), warm_cosine)


def continuing(run: Run) -> Stage:
    """Model and indexers, with attention to the selected tokens."""
    model = load(run, "warmup", sparse=True)

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return sparse_training(model, input_ids=ids, labels=labels).loss

    masters = Masters(groups_of(run, model))
    return Stage("sparse", model, masters, loss_of, lambda: validation_losses(run, model), late_decay)


def warmup(run: Run) -> None:
    with objectives(run.losses):
        train(run, warming(run), run.size.steps["warmup"], _seconds(run, "warmup"))


def sparse(run: Run) -> None:
    with objectives(run.losses):
        train(run, continuing(run), run.size.steps["sparse"], _seconds(run, "sparse"))


def compare(run: Run) -> None:
    """Some steps of both stages with the kernels' losses and with PyTorch's, on batches of four rows."""
    rows = []
    for make in (warming, continuing):
        curves = {}
        for losses in ("kernels", "torch"):
            with objectives(losses):
                stage = make(run)
                stage.steps = run.size.steps["compare"]
                made = batches(run, "compare", range(stage.steps))
                curves[losses] = [float(stage.advance(ids[:4], labels[:4])) for ids, labels in made]
        apart = max(abs(a - b) / b for a, b in zip(*curves.values(), strict=True))
        rows.append({"of": stage.name, **curves, "largest_difference": apart})
        print(f"compare: {stage.name}, {stage.steps} steps: the losses differ by at most {100 * apart:.4f} %")
    run.write("compare", rows)


MODELS = {
    "dense": ("dense", False),
    "random indexers": ("dense", True),
    "converted": ("warmup", True),
    "sparse": ("sparse", True),
    "control": ("control", False),
}


def measure(run: Run) -> None:
    """Validation losses and facts found by each model, coverage, and times of steps."""
    rows: list[dict[str, Any]] = []
    for name, (weights, is_sparse) in MODELS.items():
        model = load(run, weights, sparse=is_sparse)
        row = {"model": name, **validation_losses(run, model, 4)}
        for factor in (2, 4, 8):
            row[f"needles_{factor}"] = needle_accuracy(run, model, factor * run.size.topk)
        rows.append(row)
        print(line_of(f"measure {name}", row))
    model = load(run, "sparse")
    rows.append({"model": "indexers after sparse training", **indexer_quality(run, model)})
    patch(model, sparse=True, reference=True)
    prompt = torch.from_numpy(corpus()[1][None, : 2 * run.size.topk].copy()).to(DEVICE)
    text = generate(model, prompt, 8 * run.size.rows)[0, prompt.shape[1] :]
    print("measure: the sparse model continues a file with", repr(bytes(x for x in text.tolist() if x < SEGMENT)))
    rows += [step_times(run, model, n) for n in run.size.lengths]
    run.write("measure", rows)


def step_times(run: Run, model: Any, n: int) -> dict[str, Any]:
    """Times and memory of forward and backward over one sequence, dense and sparse."""
    ids = torch.randint(SEGMENT, (1, n), device=DEVICE)
    row: dict[str, Any] = {"context": n}
    for name in ("dense", "sparse"):
        patch(model, sparse=name == "sparse", reference=True)

        def step(name: str = name) -> None:
            of = {"input_ids": ids, "labels": ids}
            loss = sparse_training(model, **of).loss if name == "sparse" else model(**of, use_cache=False).loss
            loss.backward()
            model.zero_grad()

        row[f"{name}_seconds"], row[f"{name}_bytes"] = timed(step)
    print(line_of("measure step", row))
    return row


def timed(call: Callable[[], Any], times: int = 3) -> tuple[float | None, int]:
    """Median seconds of a call, and the memory that it takes; None where memory does not suffice."""
    found = []
    try:
        call()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        for _ in range(times if DEVICE == "cuda" else 1):
            finish_gpu()
            began = time.perf_counter()
            call()
            finish_gpu()
            found.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, 0
    return float(np.median(found)), peak_bytes() - before


def layer(run: Run) -> None:
    """One layer of 128 heads: the warm-up's loss with gradients, and attention, forward and backward."""
    if DEVICE == "cpu":
        print("layer: needs a GPU")
        return
    calls = [_warmup_of_a_layer, *(functools.partial(_flash, width=width) for width in (128, 192))]
    rows = [row for n in (32768, 131072) for call in calls for row in call(n)]
    run.write("layer", rows)


@torch.no_grad()
def _warmup_of_a_layer(n: int) -> list[dict[str, Any]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(n, *shape, device=DEVICE, dtype=torch.bfloat16)

    q, k, v, k_rope = random(128, 192), random(128, 128), random(128, 128), random(64)
    parts = {"q_rope": q[..., 128:], "k_rope": k_rope, "scale": 192**-0.5}
    q = q[..., :128]
    _, lse = mla.mla_prefill(q, k, v, **parts)
    scored = random(64, 128), random(128), torch.randn(n, 64, device=DEVICE)
    loss = functools.partial(mla.indexer_warmup_loss, q, k, *scored, lse=lse, **parts)
    calls = {"mla_prefill": functools.partial(mla.mla_prefill, q, k, v, **parts), "indexer_warmup_loss": loss}
    return [_timed_row(name, n, call) for name, call in calls.items()]


def _flash(n: int, width: int) -> Iterator[dict[str, Any]]:
    """PyTorch's FlashAttention, whose values are as wide as its keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 128, n, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.no_grad():
            yield _timed_row(f"flash forward {width}", n, attend)
        out = attend()
        gradient = torch.randn_like(out)
        backward = functools.partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        yield _timed_row(f"flash backward {width}", n, backward)


def _timed_row(name: str, n: int, call: Callable[[], Any]) -> dict[str, Any]:
    seconds, size = timed(call, 2)
    row = {"call": name, "context": n, "seconds": seconds, "bytes": size}
    print(f"layer: {name}, {n} tokens: {seconds} s, {size / 2**30:.2f} GiB")
    return row


# ---- Figures ------------------------------------------------------------------------------------------------------


def plot(run: Run) -> None:
    """Draw run.svg."""
    try:
        import matplotlib
    except ImportError:
        print("plot: needs matplotlib")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "run"})
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for draw, part in zip((_coverage, _divergence, _losses, _needles, _times, _curves), axes.flat, strict=True):
        draw(run, part)
        part.grid(alpha=0.3)
        part.legend(fontsize="small")
    figure.savefig(run.out / "run.svg", metadata={"Date": None})
    print(f"plot: {run.out / 'run.svg'}")


def _by_layer(run: Run, axes: Any, name: str) -> None:
    rows = [row for row in run.rows("warmup") if name in row]
    for i in range(len(rows[0][name]) if rows else 0):
        axes.plot([row["step"] for row in rows], [row[name][i] for row in rows], label=f"layer {i}")
    axes.set(xlabel="step of the warm-up")


def _coverage(run: Run, axes: Any) -> None:
    _by_layer(run, axes, "coverage_text")
    axes.set(ylabel=f"attention that the top-{run.size.topk} cover", ylim=(0, 1))


def _divergence(run: Run, axes: Any) -> None:
    _by_layer(run, axes, "kl_text")
    axes.set(ylabel="KL(attention || indexer)", yscale="log")


def _losses(run: Run, axes: Any) -> None:
    for name in ("sparse", "control"):
        rows = [row for row in run.rows(name) if "text" in row]
        axes.plot([row["step"] for row in rows], [row["text"] for row in rows], label=name)
    axes.set(xlabel="step after the dense stage", ylabel="validation loss of text")


def _needles(run: Run, axes: Any) -> None:
    factors = (2, 4, 8)
    for row in run.rows("measure"):
        if "needles_2" in row:
            axes.plot(factors, [row[f"needles_{x}"] for x in factors], marker=".", label=row["model"])
    axes.set(xlabel="context over top-k", ylabel="facts found", xticks=factors, ylim=(-0.05, 1.05))


def _times(run: Run, axes: Any) -> None:
    rows = [row for row in run.rows("measure") if "context" in row]
    for name in ("dense", "sparse"):
        found = [(row["context"], row[f"{name}_seconds"]) for row in rows if row[f"{name}_seconds"]]
        axes.loglog(*zip(*found, strict=True), marker=".", label=name)
    axes.set(xlabel="tokens of a sequence", ylabel="seconds of forward and backward")


def _curves(run: Run, axes: Any) -> None:
    for row in run.rows("compare"):
        for name, style in (("kernels", "-"), ("torch", ":")):
            axes.plot(row[name], style, label=f"{row['of']}, losses of {name}")
    axes.set(xlabel="step", ylabel="loss")


# ---- Command line -------------------------------------------------------------------------------------------------

STAGES = {
    "dense": dense,
    "warmup": warmup,
    "sparse": sparse,
    "control": control,
    "compare": compare,
    "measure": measure,
    "layer": layer,
    "plot": plot,
}


def summary(run: Run) -> bool:
    """Print what has come out; True if the indexers have learnt, and the sparse model is as good as the dense one."""
    before, *_, after = (row for row in run.rows("warmup") if "coverage_text" in row)
    random, learned = (float(np.mean(row["coverage_text"])) for row in (before, after))
    models = {row["model"]: row for row in run.rows("measure") if "text" in row}
    excess = {name: models[name]["text"] / models["control"]["text"] - 1 for name in models}
    print(f"the top-{run.size.topk} cover {random:.3f} of the attention at random, {learned:.3f} after the warm-up")
    apart = ", ".join(f"{name} {100 * x:+.2f} %" for name, x in excess.items() if name != "control")
    print(f"validation loss of text over the control's: {apart}")
    return learned > random + 0.3 * (1 - random) and excess["sparse"] < 0.02


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model: a minute; without a GPU always")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: dsa_from_dense, with --quick a temporary folder"
    )
    parser.add_argument(
        "--stage", choices=["all", *STAGES], default="all", help="default: all that have left no weights"
    )
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="of all stages; default: 25 on a GPU")
    parser.add_argument("--losses", choices=("kernels", "torch"), default="kernels", help="the indexers' (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: %(default)s)")
    options = parser.parse_args()
    options.quick |= DEVICE == "cpu"
    if options.budget is None and DEVICE == "cuda" and not options.quick:
        options.budget = 25.0
    return options


def main() -> int:
    options = parse()
    if DEVICE == "cpu":
        torch.set_num_threads(1)  # these matrices are too small to share
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch if options.quick else "dsa_from_dense")
        out.mkdir(parents=True, exist_ok=True)
        run = Run(QUICK if options.quick else Size(), out, options.budget, options.losses, options.seed)
        if options.stage != "all":
            STAGES[options.stage](run)
            return 0
        for name, stage in STAGES.items():
            if not (out / f"{name}.pt").exists():
                stage(run)
        return 0 if summary(run) else 1


if __name__ == "__main__":
    sys.exit(main())
