"""Writes a tiny random DeepSeek-V2 (MLA attention, dense MLPs) with the tokenizer of tests/sglang_cpu/tiny_model.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_model import CONFIG, VOCAB_SIZE, write_tiny_model

HEADS, NOPE, ROPE, VALUE, LATENT = 4, 32, 16, 32, 48
LAYERS, HIDDEN, INTERMEDIATE = CONFIG["num_hidden_layers"], CONFIG["hidden_size"], CONFIG["intermediate_size"]

# On the CPU SGLang has this kind of RoPE only; a factor of one scales nothing.
YARN = {
    "rope_type": "deepseek_yarn",
    "factor": 1.0,
    "original_max_position_embeddings": CONFIG["max_position_embeddings"],
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MLA_CONFIG: dict[str, Any] = {
    **CONFIG,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "head_dim": ROPE,
    "rope_scaling": YARN,
    "first_k_dense_replace": LAYERS,  # none of the layers has the experts that the next lines describe
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}


def write_mla_model(folder: Path) -> Path:
    """Write config, tokenizer and weights to `folder` and return it. Always the same bytes."""
    write_tiny_model(folder)
    (folder / "config.json").write_text(json.dumps(MLA_CONFIG, indent=2, sort_keys=True) + "\n")
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        scale = gain / math.sqrt(columns)
        return (torch.randn(rows, columns, generator=generator) * scale).to(torch.bfloat16)

    def ones(size: int = HIDDEN) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN, gain=math.sqrt(HIDDEN)),
        "lm_head.weight": matrix(VOCAB_SIZE, HIDDEN, gain=4.0),
        "model.norm.weight": ones(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights[prefix + "self_attn.q_proj.weight"] = matrix(HEADS * (NOPE + ROPE), HIDDEN, gain=1.5)
        weights[prefix + "self_attn.kv_a_proj_with_mqa.weight"] = matrix(LATENT + ROPE, HIDDEN, gain=1.5)
        weights[prefix + "self_attn.kv_a_layernorm.weight"] = ones(LATENT)
        weights[prefix + "self_attn.kv_b_proj.weight"] = matrix(HEADS * (NOPE + VALUE), LATENT, gain=2.0)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * VALUE, gain=2.0)
        weights[prefix + "mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[prefix + "mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[prefix + "mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        weights[prefix + "input_layernorm.weight"] = ones()
        weights[prefix + "post_attention_layernorm.weight"] = ones()
    return weights
