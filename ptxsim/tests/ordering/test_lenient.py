"""Rules that production kernels bend: errors when strict, warnings under their names when allowed."""

from __future__ import annotations

import functools

import pytest

import ptxsim
from simtest import nvrtc, runners
from simtest.mutants.run import DEFINES, arch_of
from simtest.mutants.table import MUTANTS
from simtest.single import HEADER

BENT = {
    "no fence after mbarrier init": "mbarrier-init-fence",
    "no wgmma fence": "wgmma-fence",
    "store not waited for": "bulk-exit",
    "all warps read quadrant 0": "tmem-lanes",
    "no after_thread_sync before the loads": "tcgen05-fence",
    "no before_thread_sync after the loads": "tcgen05-fence",
}
"""Mutant names, and the rule that each breaks."""


@pytest.mark.parametrize("name", BENT)
def test_lenient_runs_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = [m for m in MUTANTS if m.name == name]
    source = mutant.apply((nvrtc.KERNELS / f"{mutant.kernel}.cu").read_text())
    ptx = nvrtc.compile_ptx(source, arch_of(mutant.kernel), None, DEFINES.get(mutant.kernel, ()))
    with pytest.raises(ptxsim.SimError):
        runners.RUNNERS[mutant.kernel](ptx, "late", 0)
    real = ptxsim.Module
    for allowed in ({"strict": False}, {"allow": {BENT[name]}}):
        monkeypatch.setattr(ptxsim, "Module", functools.partial(real, **allowed))
        with pytest.warns(ptxsim.StrictWarning):
            report = runners.RUNNERS[mutant.kernel](ptx, "late", 0)
        assert {finding.rule for finding in report.findings} == {BENT[name]}
    monkeypatch.setattr(ptxsim, "Module", functools.partial(real, allow={"alloc-grows"}))
    with pytest.raises(ptxsim.SimError):
        runners.RUNNERS[mutant.kernel](ptx, "late", 0)


TENSOR = (
    HEADER
    + """.visible .entry k()
{
.reg .b32 %r<9>; .reg .pred %p<4>; .shared .align 16 .b8 s[16];
mov.u32 %r0, %tid.x; mov.u32 %r1, s; setp.lt.u32 %p1, %r0, 32; mov.u32 %r3, 0;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
BEFORE
@%p1 bra E;
tcgen05.st.sync.aligned.32x32b.x1.b32 [0x200000], {%r0}; tcgen05.wait::st.sync.aligned;
E: tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
ret;
}
"""
)
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"


@pytest.mark.parametrize(
    ("before", "rule"),
    [
        ("tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;", ""),
        ("bar.sync 0;", "tcgen05-fence"),
        (RELAXED + "tcgen05.fence::after_thread_sync;", "relaxed-order"),
        ("", "RaceError"),
    ],
)
@pytest.mark.filterwarnings("ignore::ptxsim.StrictWarning")
def test_which_rule_orders_tensor_memory(before: str, rule: str) -> None:
    """Another warp stores to columns right after their allocation: ordered, by a broken rule, or not at all."""
    module = ptxsim.Module(TENSOR.replace("BEFORE", before))
    if rule == "RaceError":
        with pytest.raises(ptxsim.RaceError):
            module.launch("k", 1, 64, [], strict=False)
        return
    assert [finding.rule for finding in module.launch("k", 1, 64, [], strict=False).findings] == [rule] * bool(rule)
    for allow in ({rule} if rule else set(), {"scope"}):
        if rule and allow == {"scope"}:
            with pytest.raises(ptxsim.RaceError):
                module.launch("k", 1, 64, [], allow=allow)
        else:
            module.launch("k", 1, 64, [], allow=allow)
