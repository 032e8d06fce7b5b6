"""Remedies of error messages: what to install.

The wheels by name: this package is not published, so no message may tell anyone to install it by its name.
"""

_CHECKOUT = 'or, in a checkout, pip install -e ./ptxsim -e ".[cu12]"'

INSTALL_NVRTC = f'pip install "nvidia-cuda-nvrtc-cu12>=12.9" (CUDA 13: "nvidia-cuda-nvrtc>=13"), {_CHECKOUT}'
"""The compiler."""

INSTALL_CUPY = (
    'pip install "cupy-cuda12x>=14" "cuda-bindings>=12.9,<13" "cuda-toolkit[nvrtc,cudart]==12.9.*" '
    '(CUDA 13: "cupy-cuda13x>=14" "cuda-bindings>=13,<14" "cuda-toolkit[nvrtc,cudart]==13.*"), '
    f"{_CHECKOUT}"
)
"""Everything that a GPU needs in addition to its driver: the extras cu12 and cu13 of setup.cfg."""
