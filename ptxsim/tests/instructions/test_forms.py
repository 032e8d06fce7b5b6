"""Every form of the ISA is either modelled or refused by name, and every line of that table is legal PTX."""

from __future__ import annotations

import ctypes

import pytest

import ptxsim
from simtest import nvrtc
from simtest.forms import DECLARED, Form, forms, kernel

FORMS = list(forms())


@pytest.mark.parametrize("form", [f for f in FORMS if not f.refused], ids=lambda f: f.line)
def test_modelled(form: Form) -> None:
    program = ptxsim.Module(kernel(form.codes, form.arch)).program("k")
    opcodes = [ins.opcode for ins in program.function.instrs]
    assert opcodes == [code.rstrip(";").split()[0] for code in form.codes] + ["ret"]


@pytest.mark.parametrize("form", [f for f in FORMS if f.refused], ids=lambda f: f.line)
def test_refused_by_name(form: Form) -> None:
    for code in form.codes:
        with pytest.raises(ptxsim.UnknownInstruction, match=r"kernel k, line 8: unknown instruction") as caught:
            ptxsim.Module(kernel((code,), form.arch)).program("k")
        assert code.rstrip(";") in str(caught.value)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("major", nvrtc.available())
def test_the_table_is_legal_ptx(major: int, arch: int) -> None:
    """The assembler inside NVRTC takes all forms at once, as inline assembly."""
    codes = [code for form in FORMS if form.arch == arch for code in form.codes]
    assert len(codes) > 100
    # A kernel may not use tensor memory alone and in pairs.
    pairs = [code for code in codes if "cta_group::2" in code]
    source = "__constant__ int constant[16];\n"
    for name, part in (("alone", [code for code in codes if code not in pairs]), ("pairs", pairs)):
        body = "\\n".join("{" + code + "}" for code in part)
        for old, new in (
            ("[tm]", "[%r90]"),
            ("tm;", "s;"),
            ("[c]", "[constant]"),
            ("bra L;", "bra L0;"),
            ("bra.uni L;", "bra.uni L0;"),
        ):
            body = body.replace(old, new)
        source += (
            f'extern "C" __global__ void {name}() {{ asm volatile("{{ {DECLARED} {body} L0: }}" ::: "memory"); }}\n'
        )
    lib, program = nvrtc.library(major), ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"forms.cu", 0, None, None)
    status = lib.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(f"-arch=sm_{arch}a".encode()))
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()


def test_the_table_covers_the_opcodes() -> None:
    """Every opcode that the simulator knows is in the table, or made by the simulator itself."""
    from ptxsim.translation.registry import OPS

    named = {code.rstrip(";").split()[0].split(".")[0] for form in FORMS for code in form.codes}
    internal = {"builtin_call", "carry_add", "carry_sub", "carry_mad", "call", "brx"}
    assert set(OPS) - internal <= named
