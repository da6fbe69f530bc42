"""One worker runs one list of actions.

    worker      what a worker serves: build, step, state; command, what it is told and says; state, what it holds
    executor    follows the list: a table from the kind of an action to what it does
    stage       one stage's F, B, I and W, and what is kept between them
    batch       a batch, and the micro-batches it is cut into; outputs, how theirs become the batch's
    entry       where received tensors enter a stage's autograd graph; loss, where that graph ends
    put_off     weight gradients that wait from I to W
    recompute   activations that are computed again, layer by layer (whole stages: see stage)
    saved_buffers   buffers that a forward both changes and keeps; buffer_values, what they were before each forward
    shared      weights that several stages use
    optimize    the update, and what it has to know of all stages; schedulers, their state by parameter
    random      draws that don't depend on where the cuts are

A step on its way down: StepCommand (what the driver says, to `Worker.step`), Step and Order (what the executor runs),
Job (one forward of a `Stage`). On its way up: StageResult (the program's), Ran (the stage's), Outcome (the executor's),
StepReport (the worker's).
"""
