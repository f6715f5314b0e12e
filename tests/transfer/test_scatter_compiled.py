"""What only the compiler can tell of the kernels, and a machine without a GPU already can: that they compile, and how they
reach memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.own_process(TRITON_INTERPRET=0)

H100 = 90  # H200 as well
KERNELS = [
    *[
        ("move_units", {"UNIT": unit, "GATHER": gather, "BLOCKS": 4})
        for unit in (4096, 16)
        for gather in (0, 1)
    ],
    *[("move_bytes", {"GATHER": gather}) for gather in (0, 1)],
    ("add_sums", {"BLOCKS": 4}),
]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from gdsstore.transfer import scatter_kernels

    return scatter_kernels


def compiled(kernel: Any, constants: dict[str, int]) -> Any:
    """For an H100, by the types that the kernel declares and nothing else: as launches do that specialise on nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {parameter.name: parameter.annotation_type or "constexpr" for parameter in kernel.params}
    source = ASTSource(kernel, signature, constants, {})
    return triton.compile(source, target=GPUTarget("cuda", H100, 32), options={"num_warps": 4})


@pytest.mark.parametrize(("name", "constants"), KERNELS)
def test_kernels_compile_and_reach_words_by_16_bytes(
    kernels: Any, name: str, constants: dict[str, int]
) -> None:
    result = compiled(getattr(kernels, name), constants)
    ptx = result.asm["ptx"]
    assert len(result.asm["cubin"]) > 0
    assert bool(re.search(r"ld\.global\S*\.v2\.b64", ptx)) == (name != "move_bytes")
    assert bool(re.search(r"st\.global\S*\.v2\.b64", ptx)) == (name == "move_units")
    assert name != "move_units" or not re.search(r"st\.global\S*(?<!v2)\.b64", ptx), "and by no less"


@pytest.mark.parametrize("name", ["move_units", "move_bytes", "add_sums"])
def test_no_value_of_an_argument_makes_another_kernel(kernels: Any, name: str) -> None:
    """Or one would be compiled in the middle of a load, long after the warm-up."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = getattr(kernels, name)
    bind = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", H100, 32))
    )
    constants = [p.name for p in kernel.params if p.is_constexpr]
    keys = set()
    for value in (0, 1, 2, 16, 4096, 65537):
        arguments = {p.name: value for p in kernel.params if not p.is_constexpr}
        arguments |= dict.fromkeys(constants, 1)
        keys.add(str(bind(**arguments)[1]))
    assert len(keys) == 1
