"""Mixtures of experts from transformers; some add the routers' balance term to their loss."""

from __future__ import annotations

from zoo.decoders import ROTARY, SPECIAL, causal
from zoo.entry import DEPTH, HEADS, WIDTH

FEW = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = dict(
    ROTARY,
    num_key_value_heads=HEADS,
    moe_intermediate_size=16,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    q_lora_rank=12,
    kv_lora_rank=12,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_group=2,
    topk_group=1,
)

ENTRIES = [
    causal("mixtral", "MixtralConfig", "MixtralForCausalLM", family="experts", padded=True, **ROTARY,
           num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1),
    causal("qwen2_moe_balanced", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", family="experts", **ROTARY, **FEW,
           moe_intermediate_size=16, shared_expert_intermediate_size=24, decoder_sparse_step=1,
           output_router_logits=True, router_aux_loss_coef=0.1),
    causal("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", family="experts", **ROTARY, **FEW, head_dim=8,
           moe_intermediate_size=16, decoder_sparse_step=2),
    causal("olmoe", "OlmoeConfig", "OlmoeForCausalLM", family="experts", **ROTARY, **FEW),
    causal("granite_moe", "GraniteMoeConfig", "GraniteMoeForCausalLM", entry={"lr": 0.005}, family="experts", **ROTARY,
           num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1),
    causal("jetmoe", "JetMoeConfig", "JetMoeForCausalLM", family="experts", **SPECIAL, hidden_size=WIDTH,
           num_hidden_layers=DEPTH, num_key_value_heads=2, kv_channels=8, intermediate_size=24, num_local_experts=4,
           num_experts_per_tok=2, max_position_embeddings=32, output_router_logits=True, aux_loss_coef=0.1,
           use_cache=False),
    causal("phimoe", "PhimoeConfig", "PhimoeForCausalLM", family="experts", entry={"random": True}, **ROTARY,
           num_local_experts=4, router_jitter_noise=0.0, input_jitter_noise=0.0),
    causal("dbrx", "DbrxConfig", "DbrxForCausalLM", family="experts", **SPECIAL, d_model=WIDTH, n_heads=HEADS,
           n_layers=DEPTH, max_seq_len=32, resid_pdrop=0.0, emb_pdrop=0.0, attn_config={"attn_pdrop": 0.0,
           "clip_qkv": 6.0, "kv_n_heads": 2, "rope_theta": 1e4}, ffn_config={"ffn_hidden_size": 24,
           "moe_num_experts": 4, "moe_top_k": 2}, use_cache=False),
    causal("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", family="experts", **LATENT),
    causal("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", family="experts", **LATENT),
    causal("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM", family="experts", **ROTARY, moe_intermediate_size=16,
           n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1,
           topk_group=1, head_dim=8),
    causal("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", family="experts", **ROTARY,
           moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=16, moe_layer_start_index=1),
    causal("gpt_oss", "GptOssConfig", "GptOssForCausalLM", family="experts", **ROTARY, head_dim=8, num_local_experts=4,
           num_experts_per_tok=2, sliding_window=5),
]
