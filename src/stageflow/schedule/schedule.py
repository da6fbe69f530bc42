"""A schedule: who does what, in which order. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stageflow.errors import ScheduleError
from stageflow.graph import StageGraph
from stageflow.observe.timeline import render_html
from stageflow.schedule import text as notation
from stageflow.schedule.actions import Action, Orders
from stageflow.schedule.costs import Costs
from stageflow.schedule.lower import Instruction, lower
from stageflow.schedule.simulate import simulate
from stageflow.schedule.simulation import Simulation
from stageflow.schedule.torch_table import Form, check_messages, parse_table, print_table
from stageflow.schedule.validate import Report, validate


@dataclass(frozen=True)
class Schedule:
    """Which worker runs which actions in which order.

    name: for people; the builder's name for a built one.
    graph: which stage feeds which.
    placement: the worker of each stage.
    microbatches: how many.
    orders: each worker's actions, in the order in which it runs them.
    copies: how many times the model is there. Of n stages, each n / copies in a row are one copy, and every stage of a
        copy sees ``microbatches`` of its own.
    versions: how many versions of its weights each stage keeps; more than one where gradients come late.

    Making one checks only that the parts fit together; `validate` checks that it can run. ``str(schedule)`` is its
    text form, which `Schedule.parse` reads back exactly.
    """

    name: str
    graph: StageGraph
    placement: tuple[int, ...]
    microbatches: int
    orders: Orders
    copies: int = 1
    versions: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "orders", tuple(tuple(order) for order in self.orders))
        if len(self.placement) != self.graph.n_stages:
            raise ScheduleError(
                f"schedule {self.name!r}: placement {self.placement} names a worker for {len(self.placement)} stages, "
                f"the graph has {self.graph.n_stages}"
            )
        if any(not 0 <= worker < len(self.orders) for worker in self.placement):
            raise ScheduleError(
                f"schedule {self.name!r}: placement {self.placement} names a worker outside 0..{len(self.orders) - 1}, "
                f"but there are orders for {len(self.orders)} workers"
            )
        idle = sorted(set(range(len(self.orders))) - set(self.placement))
        if idle:
            raise ScheduleError(
                f"schedule {self.name!r}: worker {idle[0]} has no stage; there are orders for {len(self.orders)} "
                f"workers, and placement {self.placement}: leave its order out, or place a stage there"
            )
        if self.microbatches < 1:
            raise ScheduleError(f"schedule {self.name!r}: needs at least one micro-batch, got {self.microbatches}")
        if self.copies < 1 or self.n_stages % self.copies or self.versions < 1:
            raise ScheduleError(
                f"schedule {self.name!r}: {self.n_stages} stages can't be {self.copies} equal copies with "
                f"{self.versions} versions of the weights each"
            )

    @property
    def n_stages(self) -> int:
        """How many stages."""
        return self.graph.n_stages

    @property
    def n_workers(self) -> int:
        """How many workers."""
        return len(self.orders)

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that a worker holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == worker)

    @cached_property
    def has_backward(self) -> bool:
        """False for a schedule of forwards only."""
        return any(action.kind != "F" for order in self.orders for action in order)

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((a.stage, a.microbatch) for order in self.orders for a in order if a.kind == "I")

    @property
    def refusal(self) -> str | None:
        """Why workers can't run it, and what to take instead; None for what they can."""
        if self.copies > 1:
            return (
                f"the schedule {self.name!r} needs {self.copies} copies of all weights, which workers do not keep: it "
                "can be simulated only; take 'dualpipe_v' or 'zb_v', which fill both ways with one copy"
            )
        if self.versions > 1:
            return (
                f"the schedule {self.name!r} computes gradients with weights that are a step old, which changes the "
                "mathematics: it can be simulated only; take '1f1b', which has its memory, or 'zb_v', which has its "
                "short bubble"
            )
        return None

    def whole_backward(self, stage: int, microbatch: int) -> bool:
        """Whether the backward of this stage and micro-batch is one B rather than an I and a W."""
        return (stage, microbatch) not in self._split

    def splits_backward(self, stage: int) -> bool:
        """Whether the stage has any I and W instead of a B."""
        return any((stage, microbatch) in self._split for microbatch in range(self.microbatches))

    def validate(self) -> Report:
        """Prove that this schedule runs to its end; raises ScheduleError with the first fault found."""
        return validate(self)

    def lower(self) -> tuple[tuple[Instruction, ...], ...]:
        """Each worker's actions with its sends and receives, see `stageflow.schedule.lower`."""
        return lower(self)

    def simulate(self, costs: Costs | None = None) -> Simulation:
        """Times of every action; costs in seconds, by default 1 for F, I and W, 2 for B and nothing for a hop."""
        return simulate(self, costs or Costs())

    def timeline(self, path: str | Path, costs: Costs | None = None) -> None:
        """Draw a simulated step as one HTML page that needs no network."""
        simulation = self.simulate(costs)
        title = f"{self.name}: {self.n_stages} stages, {self.n_workers} workers, {self.microbatches} micro-batches"
        page = render_html(simulation.events(), title=title, workers=self.n_workers, unit=None if costs else "unit")
        Path(path).write_text(page, encoding="utf-8")

    def draw(self, costs: Costs | None = None) -> str:
        """A picture in characters, for whole-number costs, see `stageflow.schedule.text.draw`."""
        return notation.draw(self, costs)

    def __str__(self) -> str:
        return notation.print_text(self)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text form; raises ScheduleError for what is none."""
        parts = notation.parse_text(text)
        graph = StageGraph(parts.stages, parts.edges)
        counts = {"copies": parts.copies, "versions": parts.versions}
        return cls(parts.name, graph, parts.placement, parts.microbatches, parts.orders, **counts)

    def to_csv(self, path: str | Path | None = None, *, form: Form = "compute_only") -> str:
        """As a table that torch.distributed.pipelining's runtime loads, see `stageflow.schedule.torch_table`; written
        to ``path`` if given.

        form: "compute_only", the orders; "compute_comms", with sends and receives, for a chain of stages.
        """
        table = print_table(self, form)
        if path is not None:
            Path(path).write_text(table, encoding="utf-8")
        return table

    @classmethod
    def from_csv(cls, source: str | Path, *, name: str = "csv", graph: StageGraph | None = None) -> Schedule:
        """Read such a table of either form from a file (a Path, or a string without a newline) or from its text.

        Placement and number of micro-batches are those of the actions. graph: default a chain. Raises ScheduleError
        for a cell that is no action, and if the table has messages, but not those that the actions need.
        """
        is_text = isinstance(source, str) and "\n" in source
        orders, messages = parse_table(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
        schedule = cls.from_orders(orders, name=name, graph=graph)
        check_messages(schedule, messages)
        return schedule

    @classmethod
    def from_orders(
        cls, orders: Sequence[str | Sequence[Action]], *, name: str = "custom", graph: StageGraph | None = None
    ) -> Schedule:
        """Make a schedule from each worker's actions, given as Actions or in the notation.

            Schedule.from_orders(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])

        Placement and number of micro-batches are those of the actions. graph: default a chain.
        """
        if isinstance(orders, str):
            raise ScheduleError(f"orders is one text, {orders[:40]!r}; expected a list with one for each worker")
        parsed = [notation.as_actions(order) for order in orders]
        placement = notation.placement_of(parsed)
        microbatches = 1 + max((action.microbatch for order in parsed for action in order), default=0)
        return cls(name, graph or StageGraph.chain(len(placement)), placement, microbatches, tuple(parsed))
