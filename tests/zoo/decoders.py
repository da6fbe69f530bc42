"""Decoder-only language models from transformers."""

from __future__ import annotations

from typing import Any

import transformers

from zoo.entry import BATCH, DEPTH, HEADS, LENGTH, VOCAB, WIDTH, Entry, Made, ragged, tokens

SPECIAL = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROTARY = dict(
    SPECIAL,
    hidden_size=WIDTH,
    intermediate_size=40,
    num_hidden_layers=DEPTH,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    max_position_embeddings=32,
    use_cache=False,
)
PLAIN = dict(ROTARY)
del PLAIN["num_key_value_heads"]


def causal(
    name: str,
    config: str,
    model: str,
    *,
    family: str = "decoder",
    padded: bool = False,
    entry: Any = None,
    **sizes: Any,
) -> Entry:
    """A causal language model that gets its inputs as labels; ``padded`` adds an attention mask with ragged rows."""

    def make() -> Made:
        net = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        text = tokens(BATCH, LENGTH)
        if not padded:
            return net, {"input_ids": text, "labels": text.clone()}
        mask = ragged()
        labels = text.masked_fill(mask == 0, -100)
        return net, {"input_ids": text.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}

    return Entry(name, family, make, **(entry or {}))


NO_DROP_GPT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = dict(SPECIAL, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_positions=32)
GPTJ = dict(GPT2, **NO_DROP_GPT, rotary_dim=4, use_cache=False)
NEOX = dict(PLAIN, hidden_dropout=0.0, attention_dropout=0.0)
GEMMA = dict(ROTARY, head_dim=8, attention_dropout=0.0)

ENTRIES = [
    causal("gpt2", "GPT2Config", "GPT2LMHeadModel", **GPT2, **NO_DROP_GPT, use_cache=False),
    # The default keeps a cache, so that the output holds an object that is no tensor and no plain value.
    causal("gpt2_with_cache", "GPT2Config", "GPT2LMHeadModel", **GPT2, **NO_DROP_GPT),
    causal("gpt2_dropout", "GPT2Config", "GPT2LMHeadModel", **GPT2, use_cache=False, entry={"random": True}),
    causal("gpt2_padded", "GPT2Config", "GPT2LMHeadModel", padded=True, **GPT2, **NO_DROP_GPT, use_cache=False),
    causal("gpt_neo", "GPTNeoConfig", "GPTNeoForCausalLM", **SPECIAL, hidden_size=WIDTH, num_layers=DEPTH,
           num_heads=HEADS, attention_types=[[["global", "local"], 2]], window_size=4, max_position_embeddings=32,
           resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0, use_cache=False),
    causal("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", **NEOX),
    causal("gptj", "GPTJConfig", "GPTJForCausalLM", **GPTJ),
    causal("codegen", "CodeGenConfig", "CodeGenForCausalLM", **GPTJ),
    causal("gpt_bigcode", "GPTBigCodeConfig", "GPTBigCodeForCausalLM", padded=True, **GPT2, **NO_DROP_GPT,
           use_cache=False),
    causal("openai_gpt", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", vocab_size=VOCAB, n_embd=WIDTH, n_layer=DEPTH,
           n_head=HEADS, n_positions=32, **NO_DROP_GPT),
    causal("ctrl", "CTRLConfig", "CTRLLMHeadModel", vocab_size=VOCAB, n_embd=WIDTH, dff=48, n_layer=DEPTH,
           n_head=HEADS, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False),
    causal("opt", "OPTConfig", "OPTForCausalLM", padded=True, **SPECIAL, hidden_size=WIDTH, ffn_dim=48,
           num_hidden_layers=DEPTH, num_attention_heads=HEADS, max_position_embeddings=32, word_embed_proj_dim=WIDTH,
           dropout=0.0, attention_dropout=0.0, layerdrop=0.0, use_cache=False),
    causal("opt_layerdrop", "OPTConfig", "OPTForCausalLM", **SPECIAL, hidden_size=WIDTH, ffn_dim=48,
           num_hidden_layers=DEPTH, num_attention_heads=HEADS, max_position_embeddings=32, word_embed_proj_dim=16,
           dropout=0.1, attention_dropout=0.0, layerdrop=0.4, use_cache=False, entry={"random": True}),
    causal("xglm", "XGLMConfig", "XGLMForCausalLM", **SPECIAL, d_model=WIDTH, ffn_dim=48, num_layers=DEPTH,
           attention_heads=HEADS, max_position_embeddings=32, dropout=0.0, attention_dropout=0.0,
           activation_dropout=0.0, layerdrop=0.0, use_cache=False),
    causal("bloom", "BloomConfig", "BloomForCausalLM", padded=True, **SPECIAL, hidden_size=WIDTH, n_layer=DEPTH,
           n_head=HEADS, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False),
    causal("llama", "LlamaConfig", "LlamaForCausalLM", padded=True, **ROTARY),
    causal("mistral", "MistralConfig", "MistralForCausalLM", **ROTARY, sliding_window=5),
    causal("qwen2_tied", "Qwen2Config", "Qwen2ForCausalLM", **ROTARY, tie_word_embeddings=True),
    causal("qwen3", "Qwen3Config", "Qwen3ForCausalLM", padded=True, **ROTARY, head_dim=8),
    causal("gemma", "GemmaConfig", "GemmaForCausalLM", **GEMMA),
    causal("gemma2", "Gemma2Config", "Gemma2ForCausalLM", **GEMMA, sliding_window=5, query_pre_attn_scalar=8),
    causal("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", **GEMMA, sliding_window=5, query_pre_attn_scalar=8,
           layer_types=["sliding_attention", "full_attention"] * 2),
    causal("phi", "PhiConfig", "PhiForCausalLM", **PLAIN, partial_rotary_factor=0.5, resid_pdrop=0.0, embd_pdrop=0.0),
    causal("phi3", "Phi3Config", "Phi3ForCausalLM", **ROTARY, resid_pdrop=0.0, embd_pdrop=0.0),
    causal("cohere", "CohereConfig", "CohereForCausalLM", **ROTARY, logit_scale=0.5),
    causal("cohere2", "Cohere2Config", "Cohere2ForCausalLM", **ROTARY, sliding_window=5, logit_scale=0.5),
    causal("olmo", "OlmoConfig", "OlmoForCausalLM", **ROTARY, clip_qkv=6.0),
    causal("olmo2", "Olmo2Config", "Olmo2ForCausalLM", padded=True, **ROTARY),
    causal("falcon", "FalconConfig", "FalconForCausalLM", **PLAIN, hidden_dropout=0.0, attention_dropout=0.0,
           alibi=False, multi_query=True),
    causal("falcon_alibi", "FalconConfig", "FalconForCausalLM", padded=True, **PLAIN, hidden_dropout=0.0,
           attention_dropout=0.0, alibi=True, new_decoder_architecture=False, multi_query=False),
    causal("mpt", "MptConfig", "MptForCausalLM", **SPECIAL, d_model=WIDTH, n_heads=HEADS, n_layers=DEPTH,
           expansion_ratio=2, max_seq_len=32, resid_pdrop=0.0, emb_pdrop=0.0, use_cache=False),
    causal("stablelm", "StableLmConfig", "StableLmForCausalLM", **ROTARY, hidden_dropout=0.0, attention_dropout=0.0),
    causal("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", **ROTARY, residual_dropout=0.0,
           embedding_dropout=0.0, attention_dropout=0.0, sliding_window=5),
    causal("granite", "GraniteConfig", "GraniteForCausalLM", padded=True, **ROTARY, embedding_multiplier=3.0,
           residual_multiplier=0.6, logits_scaling=1.5),
    causal("persimmon", "PersimmonConfig", "PersimmonForCausalLM", **PLAIN, hidden_dropout=0.0, attention_dropout=0.0),
    causal("nemotron", "NemotronConfig", "NemotronForCausalLM", **ROTARY),
    causal("glm", "GlmConfig", "GlmForCausalLM", **ROTARY, head_dim=8),
    causal("helium", "HeliumConfig", "HeliumForCausalLM", **ROTARY, head_dim=8),
    causal("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", **ROTARY, no_rope_layer_interval=2),
    causal("diffllama", "DiffLlamaConfig", "DiffLlamaForCausalLM", **ROTARY),
    causal("exaone4", "Exaone4Config", "Exaone4ForCausalLM", **ROTARY, sliding_window=5, sliding_window_pattern=2),
    causal("biogpt", "BioGptConfig", "BioGptForCausalLM", **PLAIN, hidden_dropout_prob=0.0,
           attention_probs_dropout_prob=0.0, layerdrop=0.0, activation_dropout=0.0),
]
