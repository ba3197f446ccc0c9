"""The thread that steps the scheduler: requests and cancellations come in from any thread, events go out to sinks.

All of the scheduler's state belongs to this thread; what others want of it is a command in its inbox, taken between two
steps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from engines.serving.meter import Meter
from engines.serving.scheduler import BusyError, Scheduler
from engines.serving.sequence import CANCELLED, DONE, FAILED, REFUSED, STOP, Event, Request, Sequence, StepReport
from exporter.errors import InputError

Sink = Callable[[Event], bool]  # gets the events of one request, in the worker's thread; True: stop this sequence here
LOG = logging.getLogger(__name__)
FAULT = "the server made an error; see its log"


class StoppingError(InputError):
    """The server accepts nothing more."""


@dataclass
class Ticket:
    """One submitted request; `sequences` once the worker has taken it."""

    request: Request
    sink: Sink
    sequences: list[Sequence] = field(default_factory=list)
    given_up: bool = False


class Worker:
    """Runs `scheduler` in a thread of its own. A context manager: leaving it ends what runs."""

    def __init__(self, scheduler: Scheduler, meter: Meter | None = None) -> None:
        self.scheduler = scheduler
        self.meter = meter or Meter(scheduler.limits)
        self.draining = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # by sequence
        self._lock, self._outstanding = threading.Lock(), 0  # sequences that were accepted and are not done
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def __enter__(self) -> Worker:
        self.meter.publish(self.scheduler)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def outstanding(self) -> int:
        """Sequences that were accepted and are not done."""
        return self._outstanding

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Hand a request in. InputError where it can never be served, BusyError where the queue is full or the server
        is about to stop."""
        self.scheduler.check(request)
        limits, ticket = self.scheduler.limits, Ticket(request, sink)
        with self._lock:
            if self.draining:
                raise StoppingError("the server is stopping; ask another one, or try again later")
            if self._outstanding + request.choices > limits.sequences + limits.queue:
                raise BusyError(f"{self._outstanding} sequences run or wait, of {limits.sequences} and {limits.queue} "
                                "that may; try again later")
            self._outstanding += request.choices
            self._inbox.put(lambda: self._take(ticket))  # before the end that `stop` puts there, never behind it
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Give a request up: its rows are free before the next step."""
        self._inbox.put(lambda: self._give_up(ticket))

    def drain(self) -> None:
        """Accept nothing more; what waits and has not begun is refused, what runs goes on."""
        with self._lock:
            self.draining = True
        self._inbox.put(self.scheduler.refuse_queued)

    def stop(self) -> None:
        """End everything that runs and the thread."""
        with self._lock:
            self.draining = True

        def end() -> None:
            self._stopped = True  # whatever comes of the rest: who stops waits for this thread
            for sequence in [*self.scheduler.queue, *self.scheduler.running]:
                self.scheduler.finish(sequence, REFUSED)

        self._inbox.put(end)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._commands()
                self._deliver(self.scheduler.step())
            except Exception:  # a fault of ours: whoever runs is told, the server goes on
                LOG.exception("the scheduler failed")
                self._fail_all()
            self.meter.publish(self.scheduler)

    def _fail_all(self) -> None:
        for sequence in [*self.scheduler.queue, *self.scheduler.running]:
            try:
                self.scheduler.finish(sequence, FAILED, FAULT)
            except Exception:
                LOG.exception("sequence %d: its rows were not freed", sequence.number)

    def _commands(self) -> None:
        wait = self.scheduler.idle
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return
            try:
                command()
            except Exception:  # a fault of ours in what one request asked; the others have no part in it
                LOG.exception("a command to the scheduler failed")
            wait = False

    def _take(self, ticket: Ticket) -> None:
        if ticket.given_up:
            self._done(ticket.request.choices)
            return
        try:
            ticket.sequences = self.scheduler.submit(ticket.request)
        except Exception:  # no step will bring an event for it: whoever waits is told here
            self._done(ticket.request.choices)
            for choice in range(ticket.request.choices):
                lost = Sequence(-1, ticket.request, choice, 0.0, DONE, FAILED, FAULT)
                self._told(ticket, Event(lost, finished=FAILED))
            raise
        self._tickets.update({sequence.number: ticket for sequence in ticket.sequences})
        self.meter.accepted(ticket.request)

    def _give_up(self, ticket: Ticket) -> None:
        ticket.given_up = True
        for sequence in ticket.sequences:
            self.scheduler.finish(sequence, CANCELLED)

    def _deliver(self, report: StepReport) -> None:
        self.meter.stepped(report)
        for event in report.events:
            ticket = self._tickets.get(event.sequence.number)
            if ticket is None:
                continue  # it was stopped by its text, and this is what came behind
            stop = self._told(ticket, event)
            if stop and not event.finished:
                self.scheduler.finish(event.sequence, STOP)
            if stop or event.finished:
                del self._tickets[event.sequence.number]
                self.meter.ended(event.sequence)
                self._done(1)

    @staticmethod
    def _told(ticket: Ticket, event: Event) -> bool:
        """Whether the sink wants no more, or cannot take any: its connection's loop is gone, or its text failed."""
        try:
            return ticket.sink(event)
        except Exception:
            LOG.exception("sequence %d: nobody takes its tokens", event.sequence.number)
            return True

    def _done(self, count: int) -> None:
        with self._lock:
            self._outstanding -= count
