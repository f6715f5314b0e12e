"""SGLang's own fixtures, full attention, sliding window, Mamba and both, with this linker behind them."""

from __future__ import annotations

from kits import LinkerUnderTest, linker_test_cases
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tests.sglang_linker.linkers import extra_config

LINKER = LinkerUnderTest(
    "sglang_backend.linker",
    "GdsStoreLinker",
    extra_config=extra_config,
    components=frozenset({ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA}),
)

globals().update(linker_test_cases(LINKER, name="GdsStore"))
