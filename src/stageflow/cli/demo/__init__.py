"""What `stageflow train` trains when you bring nothing of your own: small real models and real text."""
