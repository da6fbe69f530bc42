"""State space, recurrent and hybrid language models from transformers."""

from __future__ import annotations

from zoo.decoders import ROTARY, SPECIAL, causal
from zoo.entry import DEPTH, HEADS, WIDTH

SCAN = dict(SPECIAL, hidden_size=WIDTH, state_size=4, num_hidden_layers=DEPTH, time_step_rank=4, use_cache=False)
HEADED_SCAN = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4,
               "mamba_expand": 2}

ENTRIES = [
    causal("mamba", "MambaConfig", "MambaForCausalLM", family="state_space", **SCAN),
    causal("mamba2", "Mamba2Config", "Mamba2ForCausalLM", family="state_space", **SPECIAL, hidden_size=WIDTH,
           state_size=8, num_hidden_layers=DEPTH, num_heads=8, head_dim=8, n_groups=2, chunk_size=4, use_cache=False),
    causal("falcon_mamba", "FalconMambaConfig", "FalconMambaForCausalLM", family="state_space", **SCAN),
    causal("rwkv", "RwkvConfig", "RwkvForCausalLM", family="state_space", **SPECIAL, hidden_size=WIDTH,
           attention_hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=DEPTH, context_length=32,
           use_cache=False),
    causal("recurrent_gemma", "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", family="state_space", **ROTARY,
           lru_width=WIDTH, attention_window_size=6, block_types=["recurrent", "recurrent", "attention"]),
    causal("jamba", "JambaConfig", "JambaForCausalLM", family="state_space", **ROTARY, attn_layer_period=2,
           attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2, num_experts_per_tok=1,
           mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False),
    causal("bamba", "BambaConfig", "BambaForCausalLM", family="state_space", **ROTARY, **HEADED_SCAN,
           attn_layer_indices=[1, 3]),
    causal("zamba2", "Zamba2Config", "Zamba2ForCausalLM", entry={"lr": 0.002}, family="state_space", **SPECIAL,
           hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
           max_position_embeddings=32, layers_block_type=["linear_attention", "hybrid"] * 2, mamba_d_state=8,
           mamba_ngroups=2, n_mamba_heads=8, chunk_size=4, num_mem_blocks=1, use_mamba_kernels=False,
           use_mem_rope=True, use_cache=False),
    causal("falcon_h1", "FalconH1Config", "FalconH1ForCausalLM", family="state_space", **ROTARY, **HEADED_SCAN,
           head_dim=8, mamba_d_ssm=64),
    causal("lfm2", "Lfm2Config", "Lfm2ForCausalLM", family="state_space", **ROTARY, full_attn_idxs=[1, 3],
           block_auto_adjust_ff_dim=False),
    causal("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", entry={"lr": 0.001}, family="state_space",
           **ROTARY, head_dim=8, linear_num_value_heads=HEADS, linear_num_key_heads=2, linear_key_head_dim=8,
           linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
           shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"] * 2),
    causal("granite_hybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", family="state_space", **ROTARY,
           **HEADED_SCAN, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24,
           layer_types=["mamba", "attention"] * 2),
    causal("xlstm", "xLSTMConfig", "xLSTMForCausalLM", family="state_space", **SPECIAL, hidden_size=WIDTH,
           num_hidden_layers=DEPTH, num_heads=HEADS, chunk_size=4, chunkwise_kernel="chunkwise--native_autograd",
           sequence_kernel="native_sequence__native", step_kernel="native", use_cache=False),
]
