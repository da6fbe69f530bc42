"""The face: a model trained in stages as if on one device.

pipeline    what the user holds
arguments   looks at what the user gave; reduction, how micro-batch losses make the batch's
life        starts the workers when they are first needed, and ends them once
blueprint   the split, the schedule for each number of micro-batches, each worker's setup
start       the launcher and transport asked for; wiring, which transport joins the workers
crew        all workers of a pipeline, commanded by a driver; ranks, the same under torchrun, where there is none
planned     what a plan decides, and making one where "auto" was asked for
state       a model's state from and to stages; storage, to and from files
fit         a run that goes on after failures; feed, its batches; callbacks, what may be hooked into it
inspected   what a pipeline tells of itself; report, its stages in words and its last step
"""
