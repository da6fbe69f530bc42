"""A zoo of small models that tests train whole and in stages, to compare the numbers.

``ZOO[name].build()`` gives a fresh model in train mode, keyword inputs with eight samples, and a loss of the output.
All is built offline from tiny configurations, on the CPU, in float32. ``zoo.harness`` runs one on a single device and
compares two runs.
"""
