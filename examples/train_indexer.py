"""A lightning indexer learns which keys an attention looks at, with NumPy, CuPy, PyTorch or JAX.

The attention is frozen and random: absorbed MLA queries and keys, projected from features of the tokens. The indexer
projects the same features to a few narrow heads. First it learns from the attention over all keys (the dense warm-up
loss); then the attention sees the selected keys alone, and the indexer learns from these (the sparse stage). Each step
has a new sequence; recall is the part of the attention's true top-k that the indexer selects in a sequence that it does
not train on.

--framework arrays uses the gradients that the losses return, the chain rule by hand and a small Adam; torch and jax
differentiate the objectives of mla_cupy.torch and mla_cupy.jax. The losses are the same kernels for all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import mla_cupy

D_QK, PAGE_SIZE = 576, 64
SCALE = D_QK**-0.5
SAMPLED = 64  # queries whose selection is looked at
SIZES = {
    "tiny": {"tokens": 128, "heads": 4, "index_heads": 4, "index_dim": 32, "width": 16, "topk": 16, "rate": 0.05},
    "real": {"tokens": 4096, "heads": 128, "index_heads": 64, "index_dim": 128, "width": 64, "topk": 512, "rate": 0.01},
}


@dataclass
class Curve:
    """Curve of a training run: a loss per step, and recall after some of them."""

    loss: list[float] = field(default_factory=list)
    recall: list[tuple[int, float]] = field(default_factory=list)
    warmup_steps: int = 0


class Arrays:
    """Training with NumPy or CuPy. The other classes replace what their library does differently."""

    def __init__(self, options: argparse.Namespace, rng: np.random.Generator) -> None:
        self.options, self.rng = options, rng
        self.start()
        # The heads share most of their projection, so that they agree on keys like a model's heads.
        shape = (options.width, options.heads, D_QK)
        common, own = rng.standard_normal((shape[0], 1, D_QK), np.float32), rng.standard_normal(shape, np.float32)
        unit = options.width**-0.5
        self.frozen_q = self.put((unit * (2 * common + own)).reshape(options.width, -1))
        self.frozen_k = self.put(unit * rng.standard_normal((options.width, D_QK), np.float32))
        self.positions = self.put(np.arange(options.tokens, dtype=np.int32))
        self.pages = self.put(np.arange(options.tokens // PAGE_SIZE, dtype=np.int32)[None])
        self.length = self.put(np.array([options.tokens], np.int32))
        self.row_weights = self.put(np.full(options.tokens, 1 / options.tokens, np.float32))
        self.learn(
            {
                "q": unit * rng.standard_normal((options.width, options.index_heads * options.index_dim), np.float32),
                "k": unit * rng.standard_normal((options.width, options.index_dim), np.float32),
                "weights": np.zeros((options.width, options.index_heads), np.float32),
                "bias": np.ones(options.index_heads, np.float32),
            }
        )

    # Methods that depend on the library.

    def start(self) -> None:
        self.ops: Any = mla_cupy
        self.library: Any = np
        if self.options.device != "cpu":
            import cupy

            self.library = cupy

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        return self.library.asarray(x)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return x if self.library is np else self.library.asnumpy(x)

    def bfloat16(self, x: Any) -> Any:
        return x.astype(ml_dtypes.bfloat16)

    def select(self, index_q: Any, index_k: Any, weights: Any, ke: Any) -> Any:
        """The top-k keys among the first `ke` of each query, (s_q, topk)."""
        return mla_cupy.indexer_select(index_q, index_k, weights, ke=ke, topk=self.options.topk)[0]

    def learn(self, parameters: dict[str, np.ndarray[Any, Any]]) -> None:
        self.parameters = {name: self.put(x) for name, x in parameters.items()}
        self.adam = Adam(self.parameters)

    def step(self, sparse: bool, rate: float) -> float:
        """One step of the optimiser, on a new sequence; the loss before it, a mean over the tokens."""
        x = self.features()
        scored = self.index(self.parameters, x)
        attention, further = self.teach(x, scored, sparse)
        loss = mla_cupy.indexer_sparse_loss if sparse else mla_cupy.indexer_warmup_loss
        # In float32: NumPy and CuPy have no products of bfloat16, the default.
        index_q, index_k, _ = scored
        d_q, d_k = (self.library.empty(x.shape, np.float32) for x in (index_q, index_k))
        results = mla_cupy.LossResults(d_index_q=d_q, d_index_k=d_k)
        found = loss(*attention, **further, scale=SCALE, row_weights=self.row_weights, results=results)
        gradients = {
            "q": x.T @ d_q.reshape(len(x), -1),
            "k": x.T @ d_k,
            "weights": x.T @ found.d_weights,
            "bias": found.d_weights.sum(axis=0),
        }
        self.parameters = self.adam.update(self.parameters, gradients, rate)
        return float(found.kl.mean())

    # Methods that work with any library.

    def features(self) -> Any:
        """A new sequence, (tokens, width)."""
        return self.put(self.rng.standard_normal((self.options.tokens, self.options.width), np.float32))

    def attend(self, x: Any) -> tuple[Any, Any]:
        """Queries (tokens, heads, 576) and keys (tokens, 576) of the frozen attention."""
        q, k = self.bfloat16(x @ self.frozen_q), self.bfloat16(x @ self.frozen_k)
        return q.reshape(len(x), self.options.heads, D_QK), k

    def index(self, parameters: Any, x: Any) -> tuple[Any, Any, Any]:
        """The indexer's queries (tokens, heads, d), keys (tokens, d) and weights (tokens, heads)."""
        q = self.bfloat16(x @ parameters["q"]).reshape(len(x), self.options.index_heads, self.options.index_dim)
        return q, self.bfloat16(x @ parameters["k"]), x @ parameters["weights"] + parameters["bias"]

    def teach(self, x: Any, scored: tuple[Any, Any, Any], sparse: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of a loss: the attention's queries, keys and log-sum-exps, and the indices of the sparse stage."""
        q, k = self.attend(x)
        if sparse:
            indices = self.select(*scored, self.positions + 1)
            _, lse, _ = self.ops.sparse_mla_forward(q, k, indices, scale=D_QK**-0.5)
            return (q, k, *scored, indices), {"lse": lse}
        # All queries of a sequence can be called its newest tokens.
        pages = k.reshape(-1, PAGE_SIZE, D_QK)
        _, lse = self.ops.mla_decode(q[None], pages, self.pages, self.length, scale=D_QK**-0.5)
        return (q, k, *scored), {"lse": lse[0].T}

    def recall(self, x: Any, rows: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
        """Recall: the part of the keys `wanted` by the queries `rows` that is selected."""
        index_q, index_k, weights = self.index(self.parameters, x)
        taken = self.put(rows)
        found = self.host(self.select(index_q[taken], index_k, weights[taken], self.positions[taken] + 1))
        return float(np.mean([np.isin(w, f).mean() for w, f in zip(wanted, found, strict=True)]))


class Adam:
    """Optimiser for arrays of NumPy, CuPy and JAX alike."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.count = 0
        self.mean = {name: 0 * x for name, x in parameters.items()}
        self.square = {name: 0 * x for name, x in parameters.items()}

    def update(self, parameters: dict[str, Any], gradients: dict[str, Any], rate: float) -> dict[str, Any]:
        self.count += 1
        after = {}
        for name, g in gradients.items():
            self.mean[name] = 0.9 * self.mean[name] + 0.1 * g
            self.square[name] = 0.99 * self.square[name] + 0.01 * g * g
            mean = self.mean[name] / (1 - 0.9**self.count)
            deviation = (self.square[name] / (1 - 0.99**self.count)) ** 0.5
            after[name] = parameters[name] - rate * mean / (deviation + 1e-8)
        return after


class Torch(Arrays):
    """Training with PyTorch: autograd and its optimiser."""

    def start(self) -> None:
        import torch

        import mla_cupy.torch

        self.ops, self.library = mla_cupy.torch, torch
        self.device = "cpu" if self.options.device == "cpu" else "cuda"

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        return self.library.from_numpy(x).to(self.device)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return (x.float() if x.is_floating_point() else x).cpu().numpy()

    def bfloat16(self, x: Any) -> Any:
        return x.bfloat16()

    def select(self, index_q: Any, index_k: Any, weights: Any, ke: Any) -> Any:
        detached = (x.detach() for x in (index_q, index_k, weights))
        return super().select(*detached, ke)

    def learn(self, parameters: dict[str, np.ndarray[Any, Any]]) -> None:
        self.parameters = {name: self.put(x).requires_grad_() for name, x in parameters.items()}
        self.adam = self.library.optim.Adam(self.parameters.values(), betas=(0.9, 0.99))

    def step(self, sparse: bool, rate: float) -> float:
        x = self.features()
        attention, further = self.teach(x, self.index(self.parameters, x), sparse)
        objective = self.ops.indexer_sparse_objective if sparse else self.ops.indexer_warmup_objective
        loss, _ = objective(*attention, **further, scale=SCALE, row_weights=self.row_weights)
        self.adam.zero_grad()
        loss.backward()
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        return float(loss.detach())


class Jax(Arrays):
    """Training with JAX: its gradients, in a jitted function per stage."""

    def start(self) -> None:
        import jax

        import mla_cupy.jax

        if self.options.device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        self.ops, self.library = mla_cupy.jax, jax
        self.differentiated = jax.jit(jax.value_and_grad(self.loss), static_argnums=2)

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        return self.library.numpy.asarray(x)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def select(self, index_q: Any, index_k: Any, weights: Any, ke: Any) -> Any:
        """Logits of all queries at once: `indexer_select` writes to arrays, which JAX does not allow."""
        logits = self.ops.indexer_logits(index_q, index_k, weights, ke=ke, clean=False)
        return self.ops.indexer_topk(logits, ke=ke, k=self.options.topk, return_values=False)[0]

    def loss(self, parameters: Any, x: Any, sparse: bool) -> Any:
        scored = self.index(parameters, x)
        # Only the losses have a gradient, not the selection.
        attention, further = self.teach(x, tuple(map(self.library.lax.stop_gradient, scored)), sparse)
        (q, k), indices = attention[:2], attention[5:]
        objective = self.ops.indexer_sparse_objective if sparse else self.ops.indexer_warmup_objective
        return objective(q, k, *scored, *indices, **further, scale=SCALE, row_weights=self.row_weights)[0]

    def step(self, sparse: bool, rate: float) -> float:
        loss, gradients = self.differentiated(self.parameters, self.features(), sparse)
        self.parameters = self.adam.update(self.parameters, gradients, rate)
        return float(loss)


FRAMEWORKS = {"arrays": Arrays, "torch": Torch, "jax": Jax}


def true_topk(trainer: Arrays, x: Any, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The top-k keys of the attention's softmax, summed over its heads, of some queries: in NumPy."""
    q, k = trainer.attend(x)
    scores = np.einsum("qhd,kd->qhk", *(trainer.host(a).astype(np.float32) for a in (q[trainer.put(rows)], k)))
    scores = np.where(np.arange(len(x)) <= rows[:, None, None], scores * SCALE, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    target = (weights / weights.sum(axis=2, keepdims=True)).sum(axis=1)
    return np.argsort(-target, axis=1, kind="stable")[:, : trainer.options.topk]


def train(options: argparse.Namespace) -> Curve:
    trainer = FRAMEWORKS[options.framework](options, np.random.default_rng(options.seed))
    held_out = trainer.features()
    # Queries that have a choice.
    rows = np.linspace(2 * options.topk, options.tokens - 1, SAMPLED).astype(np.int32)
    wanted = true_topk(trainer, held_out, rows)
    curve = Curve(warmup_steps=options.warmup_steps)
    curve.recall.append((0, trainer.recall(held_out, rows, wanted)))
    text = TextColumn("{task.description}: loss {task.fields[loss]:.3f}, recall {task.fields[recall]:.3f}")
    with Progress(text, BarColumn(), TimeRemainingColumn()) as progress:
        for stage, steps in (("warm-up", options.warmup_steps), ("sparse stage", options.sparse_steps)):
            task = progress.add_task(stage, total=steps, loss=np.nan, recall=curve.recall[-1][1])
            for number in range(1, steps + 1):
                sparse = stage == "sparse stage"
                # The sparse stage has little left to learn, so its rate is lower.
                curve.loss.append(trainer.step(sparse, options.rate * (0.2 if sparse else 1)))
                if number % options.every == 0 or number == steps:
                    curve.recall.append((len(curve.loss), trainer.recall(held_out, rows, wanted)))
                progress.update(task, advance=1, loss=curve.loss[-1], recall=curve.recall[-1][1])
    return curve


def plot(curve: Curve, options: argparse.Namespace, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(7, 5), layout="constrained")
    border, steps = curve.warmup_steps, range(1, len(curve.loss) + 1)
    top.semilogy(steps[:border], curve.loss[:border], label="over all keys")
    top.semilogy(steps[border:], curve.loss[border:], label="over the selected keys")
    bottom.plot(*zip(*curve.recall, strict=True), marker=".")
    top.set(ylabel="loss: mean divergence", title=f"{options.tokens} tokens, {options.heads} heads")
    bottom.set(xlabel="step", ylabel=f"recall of the true top-{options.topk}", ylim=(0, 1))
    for axes in (top, bottom):
        axes.axvline(border, color="grey", linestyle="--", linewidth=1)
        axes.grid(alpha=0.3)
    top.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def has_gpu() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, or no driver
        return False


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="arrays", help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: the GPU, if there is one")
    parser.add_argument("--size", choices=SIZES, help="what the sizes below start from (default: real on a GPU)")
    for name, meaning in (
        ("tokens", "of a sequence, a multiple of 64"),
        ("heads", "of the attention"),
        ("index-heads", "of the indexer"),
        ("index-dim", "their width: 32, 64 or 128"),
        ("width", "of the features"),
        ("topk", "keys that a query selects"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    parser.add_argument("--rate", type=float, metavar="X", help="of Adam, a fifth of it in the sparse stage")
    parser.add_argument("--warmup-steps", type=int, default=80, metavar="N", help="default: %(default)s")
    parser.add_argument("--sparse-steps", type=int, default=40, metavar="N", help="default: %(default)s")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="steps between recalls (%(default)s)")
    parser.add_argument("--goal", type=float, default=0.85, metavar="X", help="recall to reach (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="write the curves of loss and recall")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write them as numbers")
    options = parser.parse_args()
    if options.device is None:
        options.device = "gpu" if has_gpu() else "cpu"
    for name, default in SIZES[options.size or {"cpu": "tiny", "gpu": "real"}[options.device]].items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.tokens % PAGE_SIZE or not 0 < 2 * options.topk < options.tokens:
        parser.error(f"--tokens must be a multiple of {PAGE_SIZE} and more than twice --topk")
    if min(options.heads, options.index_heads, options.width, options.every, options.warmup_steps) < 1:
        parser.error("--heads, --index-heads, --width, --every and --warmup-steps must be at least 1")
    return options


def main() -> int:
    options = parse()
    curve = train(options)
    border = curve.warmup_steps
    after = dict(curve.recall)
    losses = f"{curve.loss[0]:.3f} -> {curve.loss[border - 1]:.3f}"
    print(f"warm-up, {border} steps: loss {losses}, recall {after[0]:.3f} -> {after[border]:.3f}")
    if options.sparse_steps:
        losses = f"{curve.loss[border]:.3f} -> {curve.loss[-1]:.3f}"
        print(f"sparse stage, {options.sparse_steps} steps: loss {losses}, recall {curve.recall[-1][1]:.3f}")
    if options.plot:
        plot(curve, options, options.plot)
    if options.json:
        arguments = {name: str(x) if isinstance(x, Path) else x for name, x in vars(options).items()}
        options.json.write_text(json.dumps({"options": arguments, **asdict(curve)}, indent=1) + "\n")
    learned = curve.recall[-1][1] >= options.goal
    print("the indexer finds the keys" if learned else f"the indexer DOES NOT find the keys: below {options.goal}")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
