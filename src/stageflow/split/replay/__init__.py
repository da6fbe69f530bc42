"""Cutting any model by replaying its own forward on every stage.

A model's forward is one timeline of Python. A cut is a point in that time: right before the call of some module. Every
stage runs the model's own, unchanged forward from the start, with the model's own inputs, but

- what lies before its part is not computed: results are ghosts, tensors with a shape and no values, made up from the
  log of what the stages before it really computed; the ghosts of values that were sent become those values where the
  stage's own part begins;
- at the first module of the next stage's part it leaves, by an exception.

Glue code between modules, dicts, dataclasses, keyword arguments, None, skips, checkpoint wrappers and branches need
no handling of their own, because it is the same Python that runs.

    timeline:    embed  mask  block 0   block 1 │ block 2   block 3   norm  head  loss
    stage 0      ██████ ████  ████████  ████████ ↯ leaves
    stage 1      ░░░░░░ ████  ░░░░░░░░  ░░░░░░░░ ████████  ████████  ████  ████  ████
                 ghost  cheap and made of inputs alone: computed again

At split time:  `opening` (how far the model is taken apart) -> `trace` (one recorded run: `events`, `surroundings`,
                `reach`) -> `needs` (which stage needs what) -> `costs` -> `assembly` (a Split)
On a worker:    `stage` (the spec that travels, `travel`; a `part` for each stage) -> `program` -> `run` and `record`
In both:        `ghost` (tensors without values), `log` (what events gave), `interception` (seeing the events)
"""
