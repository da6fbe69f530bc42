"""Speech models from transformers: waveforms or spectra in, transcripts or classes out."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from zoo.encoder_decoders import BART, END
from zoo.entry import BATCH, CLASSES, DEPTH, HEADS, VOCAB, WIDTH, Entry, Made, classes, tokens

WAVE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "feat_quantizer_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "conv_dim": (12, 12, 12),
    "conv_stride": (4, 2, 2),
    "conv_kernel": (8, 3, 3),
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "classifier_proj_size": 12,
}
SAMPLES = 320


def waves(name: str, config: str, model: str, *, transcript: bool, entry: Any = None, **sizes: Any) -> Entry:
    """Noise as sound, with a transcript under CTC or one class per sound."""

    def make() -> Made:
        task = {"ctc_loss_reduction": "mean"} if transcript else {"num_labels": CLASSES}
        net = getattr(transformers, model)(getattr(transformers, config)(**sizes, **task))
        labels = tokens(BATCH, 4) if transcript else classes()
        return net, {"input_values": torch.randn(BATCH, SAMPLES), "labels": labels}

    return Entry(name, "speech", make, **(entry or {}))


def spectra(name: str, config: str, model: str, shape: tuple[int, int], **sizes: Any) -> Entry:
    """A spectrum of the given shape and the text that was spoken."""

    def make() -> Made:
        net = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        target = tokens(BATCH, 6)
        shifted = torch.cat([torch.full((BATCH, 1), END), target[:, :-1]], dim=1)
        return net, {"input_features": torch.randn(BATCH, *shape), "decoder_input_ids": shifted, "labels": target}

    return Entry(name, "speech", make)


def audio_spectrogram() -> Made:
    config = transformers.ASTConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=48, patch_size=4,
        frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=12, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=CLASSES,
    )
    return transformers.ASTForAudioClassification(config), {
        "input_values": torch.randn(BATCH, 16, 12), "labels": classes()}


SEW = dict(WAVE, squeeze_factor=2)
BERT_WAVE = {k: v for k, v in WAVE.items() if not k.startswith("conv_")}


def wav2vec2_bert() -> Made:
    config = transformers.Wav2Vec2BertConfig(
        **BERT_WAVE, feature_projection_input_dim=10, position_embeddings_type="relative_key",
        left_max_position_embeddings=4,
        right_max_position_embeddings=2, conv_depthwise_kernel_size=3, conformer_conv_dropout=0.0, num_labels=CLASSES,
    )
    return transformers.Wav2Vec2BertForSequenceClassification(config), {
        "input_features": torch.randn(BATCH, 14, 10), "labels": classes()}


ENTRIES = [
    waves("wav2vec2", "Wav2Vec2Config", "Wav2Vec2ForCTC", transcript=True, **WAVE),
    waves("wav2vec2_layerdrop", "Wav2Vec2Config", "Wav2Vec2ForCTC", transcript=True, entry={"random": True}, **{**WAVE,
          "layerdrop": 0.4, "hidden_dropout": 0.1}),
    waves("hubert", "HubertConfig", "HubertForSequenceClassification", transcript=False, **WAVE),
    waves("wavlm", "WavLMConfig", "WavLMForSequenceClassification", transcript=False, **WAVE, num_buckets=8,
          max_bucket_distance=16),
    waves("unispeech_sat", "UniSpeechSatConfig", "UniSpeechSatForCTC", transcript=True, **WAVE),
    waves("data2vec_audio", "Data2VecAudioConfig", "Data2VecAudioForCTC", transcript=True, **{**WAVE,
          "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5}),
    waves("sew", "SEWConfig", "SEWForSequenceClassification", transcript=False, **SEW),
    waves("wav2vec2_conformer", "Wav2Vec2ConformerConfig", "Wav2Vec2ConformerForCTC", transcript=True, **WAVE,
          position_embeddings_type="rotary", conv_depthwise_kernel_size=3, conformer_conv_dropout=0.0),
    Entry("wav2vec2_bert", "speech", wav2vec2_bert),
    spectra("whisper", "WhisperConfig", "WhisperForConditionalGeneration", (10, 24), **BART, num_mel_bins=10,
            max_source_positions=12, max_target_positions=16, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    spectra("speech_to_text", "Speech2TextConfig", "Speech2TextForConditionalGeneration", (24, 10), **BART,
            input_feat_per_channel=10, input_channels=1, num_conv_layers=2, conv_kernel_sizes=(3, 3), conv_channels=24,
            max_source_positions=24, max_target_positions=16, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    Entry("audio_spectrogram", "speech", audio_spectrogram),
]
