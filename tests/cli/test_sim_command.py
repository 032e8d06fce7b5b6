"""`mla-cupy sim`: the simulator's command line, reached from a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_cupy import cli

PTX = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry add(.param .u64 x)
{
    .reg .b32 %r<3>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [x];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.s64 %d3, %d1, %d2;
    red.global.add.u32 [%d3], %r1;
    ret;
}
"""


def test_sim_runs_a_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "add.ptx"
    path.write_text(PTX)
    assert cli.main(["sim", "check", str(path)]) == 0
    assert "add: " in capsys.readouterr().out
    assert cli.main(["sim", "run", str(path), "zeros:i4:32"]) == 0
    assert "global atomic" in capsys.readouterr().out
    assert cli.main(["sim", "run", str(path), "zeros:i4:31"]) == 1
    assert "out of bounds" in capsys.readouterr().err
