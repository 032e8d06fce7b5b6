"""Runs one instruction on 32 lanes: inputs come from arrays, the result goes to an array."""

from __future__ import annotations

import numpy as np

import ptxsim

_LOAD = {"u8": "b16", "u16": "b16", "u32": "b32", "u64": "b64"}
HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"


def program(code: str, inputs: list[np.ndarray], output: np.ndarray) -> str:
    """Return the PTX of a kernel that applies ``code`` to its inputs (see :func:`run`)."""
    names = "abcefg"[: len(inputs)]
    params = [f".param .u64 p_{n}" for n in [*names, "d"]]
    lines = [".reg .b64 %x<9>; .reg .b32 %t<9>; .reg .pred %p<4>;", "mov.u32 %t0, %tid.x;"]
    for index, (name, array) in enumerate(zip(names, inputs, strict=False)):
        width = array.dtype.itemsize
        kind = "b16" if width < 4 else f"b{8 * width}"
        lines += [
            f".reg .{kind} %{name};",
            f"ld.param.u64 %x{index}, [p_{name}];",
            f"mad.wide.u32 %x{index}, %t0, {width}, %x{index};",
            f"ld.global.u{8 * width} %{name}, [%x{index}];",
        ]
    width = output.dtype.itemsize
    lines += [
        f".reg .{'b16' if width < 4 else f'b{8 * width}'} %d;",
        code,
        "ld.param.u64 %x8, [p_d];",
        f"mad.wide.u32 %x8, %t0, {width}, %x8;",
        f"st.global.u{8 * width} [%x8], %d;",
        "ret;",
    ]
    return HEADER + f".visible .entry k({', '.join(params)})\n{{\n" + "\n".join(lines) + "\n}\n"


def run(code: str, inputs: list[np.ndarray], output: np.ndarray, check: bool = True, mode: str = "early") -> np.ndarray:
    """Execute ``code`` with inputs in %a, %b, %c... (registers of the arrays' widths) and %d stored to the output.

    Parameters
    ----------
    code : str
        PTX statements.
    inputs : list of numpy.ndarray
        Arrays of 32 elements; registers are raw bits.
    output : numpy.ndarray
        Receives %d, 32 elements.
    check, mode : optional
        Passed on to the launch.

    Returns
    -------
    numpy.ndarray
        ``output``.
    """
    text = program(code, inputs, output)
    ptxsim.Module(text).launch("k", 1, 32, [*inputs, output], check=check, mode=mode)
    return output


EDGES32 = np.array(
    [0, 1, 2, 3, 5, 7, 31, 32, 33, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x12345678, 0x7FFFFFFE, 0x7FFFFFFF,
     0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0xDEADBEEF, 0x0F0F0F0F, 0xAAAAAAAA, 0x55555555, 100, 1000, 12345,
     0x00FF00FF, 0xFF00FF00, 0xC0FFEE],
    "u4",
)  # fmt: skip
FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, -2.5, 0.1, 3.14159, 1e-3, -1e-3, 1e10, -1e10, 3e38, -3e38, 1e-38, 1e-40, -1e-40, 0.5,
     2.5, 3.5, 100.25, 65504.0, 65520.0, 70000.0, 448.0, 464.0, 500.0, np.inf, -np.inf, np.nan, 0.3333333, 123456.789],
    "f4",
)  # fmt: skip
