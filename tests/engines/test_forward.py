"""The small model in float32: what its first tokens depend on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.forward import logprobs, main
from tests.engines.gpu.check import LENGTHS, prompts
from tests.engines.model import configuration, weights

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 40, "kv_lora_rank": 16}
PROMPT = [5, 9, 2, 30, 7, 7, 21]


@pytest.mark.parametrize("rank", [None, 24])
def test_whole_prompts_and_lost_parts(rank: int | None) -> None:
    """Each token of a prompt counts, and the order; of a part that is lost none, in no layer."""
    torch = pytest.importorskip("torch")
    config = configuration(q_lora_rank=rank, torch_dtype="float32", **SMALL)
    tensors = weights(config)

    def of(tokens: list[int], lost: int = 0) -> Any:
        return logprobs(config, tensors, tokens, lost)

    whole, part = of(PROMPT), of(PROMPT, 3)
    assert whole.shape == (40,)
    assert torch.allclose(whole.exp().sum(), torch.tensor(1.0))
    for at in range(len(PROMPT)):
        changed = [*PROMPT[:at], 11, *PROMPT[at + 1 :]]
        assert not torch.allclose(of(changed), whole, atol=1e-3)
        assert torch.allclose(of(changed, 3), part, atol=1e-5) == (at < 3)
    assert not torch.allclose(of([*PROMPT[:2], PROMPT[3], PROMPT[2], *PROMPT[4:]]), whole, atol=1e-3)


def test_attention_is_that_of_the_definition() -> None:
    """One layer, two tokens and one head, written out; scores depend on the difference of positions."""
    torch = pytest.importorskip("torch")
    sizes = {**SMALL, "num_attention_heads": 1, "num_hidden_layers": 1, "torch_dtype": "float32"}
    config = configuration(qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, **sizes)
    tensors = weights(config)
    attention = "model.layers.0.self_attn."

    def norm(x: Any) -> Any:  # the norms' weights are ones
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    x = tensors["model.embed_tokens.weight"][torch.tensor([3, 8])]
    h = norm(x)
    q = h[1] @ tensors[attention + "q_proj.weight"].T
    rows = h @ tensors[attention + "kv_a_proj_with_mqa.weight"].T
    both = norm(rows[:, :16]) @ tensors[attention + "kv_b_proj.weight"].T
    angle = torch.tensor([1.0, 0.0])  # from each key's position to the query's, 1: theta to the power 0 is 1
    turned = torch.stack((q[4] * angle.cos() - q[5] * angle.sin(), q[5] * angle.cos() + q[4] * angle.sin()), 1)
    scores = (both[:, :4] @ q[:4] + (turned * rows[:, 16:]).sum(1)) * 6**-0.5
    x = x[1] + scores.softmax(0) @ both[:, 4:] @ tensors[attention + "o_proj.weight"].T
    gate, up, down = (tensors[f"model.layers.0.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    x = x + (torch.nn.functional.silu(norm(x) @ gate) * (norm(x) @ up)) @ down
    wanted = (norm(x) @ tensors["lm_head.weight"].T).log_softmax(-1)
    assert torch.allclose(logprobs(config, tensors, [3, 8]), wanted, atol=1e-5)


def test_prompts_are_told_by_number(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("tests.engines.forward.weights", lambda config: {"heads": config["num_attention_heads"]})
    given: list[Any] = []

    def known(config: Any, tensors: Any, tokens: list[int], lost: int) -> Any:
        given.append((tensors["heads"], len(tokens), lost, config["q_lora_rank"]))
        return torch.tensor([-3.0, -0.5, -9.0, -1.0, -2.0])

    monkeypatch.setattr("tests.engines.forward.logprobs", known)
    assert main(["--prompts", "3,5", "--lost", "7", "--heads", "8"]) == 0
    assert given == [(8, 16, 7, 768), (8, 63, 7, 768)]
    assert "prompt 5, 63 tokens: 1 -0.500, 3 -1.000, 4 -2.000, 0 -3.000" in capsys.readouterr().out


def test_tokens_may_follow_a_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("tests.engines.forward.weights", lambda config: {})
    given: list[list[int]] = []

    def known(config: Any, tensors: Any, tokens: list[int], lost: int) -> Any:
        given.append(tokens)
        return torch.zeros(5)

    monkeypatch.setattr("tests.engines.forward.logprobs", known)
    assert main(["--prompts", "17", "--after", "8,9"]) == 0
    assert given == [[*prompts(max(LENGTHS), 18)[17], 8, 9]]
    assert f"prompt 17, {LENGTHS[1] + 2} tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--prompts", "3,5", "--after", "8"])
    assert "--after: got 2 prompts, expected one" in capsys.readouterr().err
