"""Every exception stageflow raises on purpose.

    StageflowError
    ├── InputError          an argument or a batch is wrong; nothing was run          (also a ValueError)
    ├── SplitError          the model can't be cut into these stages; says what stopped each way
    ├── ScheduleError       the schedule is incomplete, cyclic, deadlocks or names what isn't there
    ├── LaunchError         the workers could not be started, or this machine lacks what they need
    ├── CheckpointError     a saved pipeline is missing, damaged or does not fit the model
    ├── TransportError      a message between two workers could not be delivered
    │   ├── FrameError          the bytes are not a frame this version understands
    │   └── TransferTimeout     nothing arrived before the deadline                   (also a TimeoutError)
    ├── Aborted             another worker failed first; this one was told to stop
    └── PipelineError       a running pipeline failed
        ├── StageFailed         code of a stage, the loss or the optimizer raised; that exception is __cause__
        ├── WorkerDied          a worker's process ended without being asked to
        ├── WorkerHung          no worker made progress for `timeout` seconds         (also a TimeoutError)
        └── PipelineClosed      the pipeline was closed, or can't be used after a failure
"""


class StageflowError(Exception):
    """The root of all errors that stageflow raises on purpose."""


class InputError(StageflowError, ValueError):
    """An argument or a batch is wrong; refused before any work."""


class SplitError(StageflowError):
    """The model can't be cut into the stages asked for."""


class ScheduleError(StageflowError, ValueError):
    """A schedule is incomplete, cyclic, would deadlock, or does not fit its stages."""


class LaunchError(StageflowError):
    """Workers could not be started."""


class CheckpointError(StageflowError):
    """A saved pipeline is missing, damaged or does not fit the model."""


class TransportError(StageflowError):
    """A message between two workers could not be delivered."""


class FrameError(TransportError):
    """Bytes that are not a frame this version understands, or a value that has no frame."""


class TransferTimeout(TransportError, TimeoutError):
    """Nothing arrived before the deadline."""


class Aborted(StageflowError):
    """Another worker failed first; this one was told to stop."""


class PipelineError(StageflowError):
    """A running pipeline failed.

    worker, stage, microbatch: numbers of where, as far as known. action: as text, like "5B3".
    """

    def __init__(
        self,
        *args: object,
        worker: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(*args)
        self.worker = worker
        self.stage = stage
        self.microbatch = microbatch
        self.action = action


class StageFailed(PipelineError):
    """The code of a stage, the loss or the optimizer raised; that exception is ``__cause__``."""


class WorkerDied(PipelineError):
    """A worker's process ended without being asked to."""


class WorkerHung(PipelineError, TimeoutError):
    """No worker made progress before the deadline."""


class PipelineClosed(PipelineError):
    """The pipeline was closed, or can't be used any more after a failure."""
