"""gdsstore for SGLang 0.5.23: a HiCache storage backend that keeps KV pages on this machine's drive. See docs/sglang.md."""
