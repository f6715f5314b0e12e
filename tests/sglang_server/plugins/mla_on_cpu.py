"""Lets SGLang 0.5.23 run MLA with `--attention-backend torch_native`; a plugin that SGLang loads in each of its processes.

Which form of MLA a forward takes is decided by a handler, registered by the name of the attention backend. torch_native has none
and gets triton's: that takes the expanded form for a prompt without a cached prefix, and torch_native, which reads keys from the
pool of latent vectors, has no such form (a shape error in its first forward). The absorbed form works for all prompts.
"""

from typing import Any


def install() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    def absorbed(attention: Any, forward_batch: Any) -> AttnForwardMethod:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register("torch_native", absorbed)
