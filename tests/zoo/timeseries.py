"""Forecasting models from transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from zoo.entry import BATCH, CLASSES, HEADS, WIDTH, Entry, Made, classes

HISTORY = 16
HORIZON = 6
LAGS = [1, 3]
FORECASTER = {
    "prediction_length": HORIZON,
    "context_length": HISTORY,
    "lags_sequence": LAGS,
    "num_time_features": 2,
    "d_model": WIDTH,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "use_cache": False,
}
PATCHED = {
    "num_input_channels": 3,
    "context_length": HISTORY,
    "prediction_length": HORIZON,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": WIDTH,
    "loss": "mse",
}
QUIET_PATCHTST = {"attention_dropout": 0.0, "positional_dropout": 0.0, "path_dropout": 0.0, "ff_dropout": 0.0,
                  "head_dropout": 0.0}


def forecaster(name: str, config: str, model: str, **sizes: Any) -> Entry:
    """The past and the calendar of past and future; the loss is how unlikely the true future was."""

    def make() -> Made:
        net = getattr(transformers, model)(getattr(transformers, config)(**FORECASTER, **sizes))
        past = HISTORY + max(LAGS)
        return net, {
            "past_values": torch.randn(BATCH, past).cumsum(1),
            "past_time_features": torch.randn(BATCH, past, 2),
            "past_observed_mask": torch.ones(BATCH, past),
            "future_values": torch.randn(BATCH, HORIZON),
            "future_time_features": torch.randn(BATCH, HORIZON, 2),
        }

    return Entry(name, "timeseries", make, lr=0.004)


def patched(name: str, config: str, model: str, **sizes: Any) -> Entry:
    """Several channels, cut into patches."""

    def make() -> Made:
        net = getattr(transformers, model)(getattr(transformers, config)(**PATCHED, **sizes))
        return net, {"past_values": torch.randn(BATCH, HISTORY, 3), "future_values": torch.randn(BATCH, HORIZON, 3)}

    return Entry(name, "timeseries", make)


def patchtst_classes() -> Made:
    config = transformers.PatchTSTConfig(**PATCHED, **QUIET_PATCHTST, num_hidden_layers=3, num_attention_heads=HEADS,
                                         ffn_dim=48, num_targets=CLASSES, norm_type="layernorm", use_cls_token=True)
    return transformers.PatchTSTForClassification(config), {
        "past_values": torch.randn(BATCH, HISTORY, 3), "target_values": classes()}


def timesfm() -> Made:
    config = transformers.TimesFmConfig(
        patch_length=4, context_length=HISTORY, horizon_length=8, freq_size=3, num_hidden_layers=3, hidden_size=WIDTH,
        intermediate_size=48, head_dim=8, num_attention_heads=HEADS, quantiles=[0.1, 0.5, 0.9], attention_dropout=0.0,
        use_positional_embedding=True)
    return transformers.TimesFmModelForPrediction(config), {
        "past_values": torch.randn(BATCH, HISTORY), "freq": torch.arange(BATCH).remainder(3)[:, None],
        "future_values": torch.randn(BATCH, 8)}


ENTRIES = [
    forecaster("informer", "InformerConfig", "InformerForPrediction", input_size=1, attention_type="full", distil=True),
    forecaster("autoformer", "AutoformerConfig", "AutoformerForPrediction", input_size=1, label_length=4,
               moving_average=3, autocorrelation_factor=1),
    forecaster("time_series_transformer", "TimeSeriesTransformerConfig", "TimeSeriesTransformerForPrediction",
               input_size=1),
    patched("patchtst", "PatchTSTConfig", "PatchTSTForPrediction", **QUIET_PATCHTST, num_hidden_layers=3,
            num_attention_heads=HEADS, ffn_dim=48, norm_type="batchnorm"),
    Entry("patchtst_classes", "timeseries", patchtst_classes, lr=0.004),
    patched("patchtsmixer", "PatchTSMixerConfig", "PatchTSMixerForPrediction", num_layers=3, dropout=0.0,
            head_dropout=0.0, mode="mix_channel", gated_attn=True),
    Entry("timesfm", "timeseries", timesfm, lr=0.001),
]
