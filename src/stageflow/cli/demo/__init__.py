"""What `stageflow train` trains when you bring nothing of your own: small real models and real text."""

HEADS = 4
"""Of the GPT's attention; its width is a multiple."""
