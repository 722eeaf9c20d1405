"""The learner's side of its actors: starting, listening, replacing, killing and ending them."""

from __future__ import annotations

import multiprocessing
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from signal import SIGKILL
from typing import Self

from examples.cartpole.actor import Delivery, act
from examples.cartpole.weights import Outlet

GATHER = 1.0  #: seconds after the first delivery for which the learner waits for the other actors
START = 90.0  #: seconds in which there must be a delivery
END = 10.0  #: seconds in which an actor must end


class ActorError(Exception):
    """An actor did what it must not."""


@dataclass(slots=True, eq=False)
class Member:
    """One actor as the learner sees it."""

    name: str
    process: BaseProcess
    connection: Connection
    version: int = 0  #: that made its last batch
    latency: float = 0.0  #: seconds from publish to loaded, the last time
    batches: int = 0
    cpu_seconds: float = 0.0


class Crew:
    """The actors that run now. Each has a pipe of its own: a process that dies may hold the lock of anything shared."""

    def __init__(self, outlet: Outlet, *, environments: int, steps: int, seed: int) -> None:
        self.members: dict[str, Member] = {}
        self.started = 0
        self.killed = 0
        self.cpu_seconds = 0.0  #: of those that are gone
        self._outlet = outlet
        self._arguments = environments, steps
        self._seed = seed
        self._random = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        # One process loads torch and gymnasium; every actor is a fork of it and starts in milliseconds.
        self._context.set_forkserver_preload(["examples.cartpole.train"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members.values():
            member.connection.close()
        give_up_at = time.monotonic() + END
        for member in list(self.members.values()):
            member.process.join(max(0.0, give_up_at - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
            self._remove(member)

    def start(self) -> Member:
        """Add an actor."""
        self.started += 1
        name = f"actor-{self.started}"
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._outlet.inlet(name), *self._arguments, self._seed * 1000 + self.started)
        process = self._context.Process(target=act, args=arguments, name=name, daemon=True)
        process.start()
        theirs.close()
        self.members[name] = Member(name, process, ours)
        return self.members[name]

    def kill(self) -> Member:
        """End a random actor in the middle of whatever it does."""
        member = self._random.choice(list(self.members.values()))
        member.process.kill()
        self.killed += 1
        return member

    def gather(self) -> tuple[list[tuple[Member, Delivery]], list[Member]]:
        """What the actors have made: one delivery each; and who was found dead. Nobody waits for who is slow or new.

        Raises:
            ActorError: an actor ended that nobody killed, or there was no delivery at all.
        """
        taken: list[tuple[Member, Delivery]] = []
        lost: list[Member] = []
        waiting = {member.connection: member for member in self.members.values()}
        give_up_at = time.monotonic() + START
        while waiting:
            if taken and not any(member.batches for member in waiting.values()):
                give_up_at = 0.0  # those that are only starting
            ready = wait(list(waiting), max(0.0, give_up_at - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                member = waiting.pop(connection)
                delivery = self._receive(member)
                if delivery is None:
                    lost.append(member)
                    continue
                if not taken:
                    give_up_at = time.monotonic() + GATHER
                taken.append((member, delivery))
        if not taken and not lost:
            raise ActorError(f"no actor delivered anything within {START:g} s")
        return taken, lost

    def _receive(self, member: Member) -> Delivery | None:
        try:
            delivery: Delivery = member.connection.recv()
            member.connection.send(None)  # go on
        except (EOFError, OSError):  # also in the middle of a message
            self._bury(member)
            return None
        member.version, member.cpu_seconds = delivery.batch.version, delivery.cpu_seconds
        member.batches += 1
        if delivery.adopted is not None and member.batches > 1:
            member.latency = delivery.adopted.latency
        return delivery

    def _bury(self, member: Member) -> None:
        member.process.join(END)
        code = member.process.exitcode
        self._remove(member)
        if code != -SIGKILL:
            raise ActorError(f"{member.name} ended by itself, with code {code}")

    def _remove(self, member: Member) -> None:
        member.connection.close()
        member.process.join()
        member.process.close()
        self.cpu_seconds += member.cpu_seconds
        del self.members[member.name]
        with suppress(OSError):
            self._outlet.forget(member.name)
