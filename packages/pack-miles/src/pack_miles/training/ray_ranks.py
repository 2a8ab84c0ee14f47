"""Ranks as Ray actors, one a rank in a placement group, as MILES starts its own. Nothing else here imports ray.

With `miles.fully_async` rollout workers are actors beside them, in the same group.
"""

from __future__ import annotations

import io
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from threading import Event
from typing import TYPE_CHECKING, Any

import attrs

from pack_miles.asynchronous.dealing import Dealer
from pack_miles.asynchronous.post import Delivery, Post
from pack_miles.errors import InputError
from pack_miles.settings.config import Config

if TYPE_CHECKING:
    from types import ModuleType

#: Bytes of a local Ray's object store: ranks exchange tensors over torch.distributed, Ray carries a few words.
STORE = 100 * 2**20

#: Seconds a killed actor may take to be gone before this process ends what is left of it on its own machine.
GONE = 2.0

#: Seconds between two looks at whether the run was asked to end.
LOOK = 0.25

#: What one rank runs: its number, the run, where ranks meet, whether to show tracebacks, and where rollouts come from.
#: Returns an exit status.
RankFunction = Callable[[int, Config, str, bool, Post], int]

#: Threads of a rank whose rollouts come from workers: one trains, one waits for new weights, one takes deliveries.
THREADS = 3


@attrs.frozen
class Place:
    """Where the process of a rank is: its node in Ray and its address, its id there, and a port free on it."""

    node: str
    address: str
    pid: int
    port: int


@attrs.frozen
class Outcome:
    """How ranks ended: exit status by rank, None for one that did not come to an end, and what Ray says of the dead.

    `about` says what became of the work of rollout workers.
    """

    statuses: tuple[int | None, ...]
    deaths: tuple[str, ...]
    about: str = ""


class Rank:
    """One rank's process; Ray makes an actor of it."""

    def __init__(self) -> None:
        """Begin without rollouts."""
        self._post = Post()

    def place(self) -> Place:
        """Return where this process is."""
        return place_here()

    def published(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the next weights once they are there, after the collections and optimizer steps they have seen."""
        publication = self._post.published()
        return (publication.collections, publication.version), publication.weights

    def deliver(self, delivery: Delivery) -> None:
        """Take a collection."""
        self._post.deliver(delivery)

    def fail(self, reason: str) -> None:
        """Take the news that no further collection will come."""
        self._post.fail(reason)

    def run(self, function: RankFunction, rank: int, config: Config, first: Place, debug: bool) -> tuple[int, str]:
        """Run the rank function as a launcher would have it run; return its exit status and what it said."""
        os.environ |= {
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
            "RANK": str(rank),
            "WORLD_SIZE": str(config.run.ranks),
            "LOCAL_RANK": "0",  # Ray shows an actor its own GPU alone
        }
        if first.address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with redirect_stderr(io.StringIO()) as said:
            status = function(rank, config, "env://", debug, self._post)
        return status, said.getvalue()


def place_here() -> Place:
    """Return where this process is, an actor's."""
    import ray

    node, address = ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address())
    with socket.socket() as probe:
        probe.bind((address, 0))
        return Place(node, address, os.getpid(), int(probe.getsockname()[1]))


class Asked(Exception):
    """The run was asked to end while its ranks ran."""


def run_actors(function: RankFunction, config: Config, debug: bool, grace: float, asked: Event) -> Outcome:
    """Run every rank of a configuration as an actor and return how they ended; none is left when this returns.

    To be called in a thread of its own: a signal that raises inside Ray can crash it, and Ray, where it can, puts up
    handlers in place of others'.

    Args:
        function: what one rank runs; importable on every node.
        config: the run's; `output.root` is one folder that every node sees.
        debug: whether ranks show tracebacks.
        grace: seconds the other ranks get to say what they saw once one has failed.
        asked: set to end the run.

    Raises:
        InputError: the cluster has no room for the ranks.
        Asked: the run was asked to end, and has.
    """
    import ray

    actors: Sequence[Any] = []
    places: Sequence[Place] = []
    dealer: Dealer | None = None
    with _connected(ray, config), _room(ray, config, asked) as group:
        try:
            actors = [_actor(ray, config, group, rank) for rank in range(config.run.ranks)]
            found = [actor.place.remote() for actor in actors]
            _ready(ray, found, math.inf, asked)
            places = ray.get(found)
            # Ray fills places in an order of its own, and a replica's ranks are neighbours: they talk the most.
            actors, places = zip(*by_node(list(zip(actors, places, strict=True))), strict=True)
            runs = [actor.run.remote(function, rank, config, places[0], debug) for rank, actor in enumerate(actors)]
            if config.miles.fully_async:
                dealer = Dealer(ray, config, lambda slot: _worker(ray, config, group, slot), actors)
            return _watch(ray, runs, grace, asked, dealer)
        finally:
            if dealer:
                actors, places = [*actors, *dealer.actors], [*places, *dealer.places]
            _end(ray, actors, places)


def by_node(ranks: Sequence[tuple[Any, Place]]) -> list[tuple[Any, Place]]:
    """Return actors and their places with those of a node side by side, nodes and actors as they first come.

    >>> here, there = (Place(name, "10.0.0.1", pid=1, port=1) for name in ("here", "there"))
    >>> [actor for actor, _ in by_node([("a", there), ("b", here), ("c", there), ("d", here)])]
    ['a', 'c', 'b', 'd']
    """
    nodes = list(dict.fromkeys(place.node for _, place in ranks))
    return sorted(ranks, key=lambda rank: nodes.index(rank[1].node))


def _ready(ray: ModuleType, wanted: Sequence[Any], seconds: float, asked: Event) -> bool:
    """Wait until all results are there, for so many seconds at most, and return whether they are."""
    deadline, left = time.monotonic() + seconds, list(wanted)
    while left and time.monotonic() < deadline:
        _, left = ray.wait(left, num_returns=len(left), timeout=LOOK)
        if asked.is_set():
            raise Asked
    return not left


@contextmanager
def _connected(ray: ModuleType, config: Config) -> Iterator[None]:
    """Join the cluster of RAY_ADDRESS, or this process's; without either, start one on loopback and end it after."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # its report would leave the machine
            ray.init(
                address="local",
                num_cpus=(config.run.ranks + _workers(config)) * config.run.threads_per_rank,
                object_store_memory=STORE,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        yield
    finally:
        ray.shutdown()


@contextmanager
def _room(ray: ModuleType, config: Config, asked: Event) -> Iterator[Any]:
    """Hold room for every rank and worker, on as few nodes as possible, until all have ended."""
    from ray.util.placement_group import placement_group, remove_placement_group

    each = _needs(config)
    workers = f" and run.rollout_workers = {_workers(config)}" if _workers(config) else ""
    group = placement_group([each] * (config.run.ranks + _workers(config)), strategy="PACK")
    try:
        if not _ready(ray, [group.ready()], config.run.timeout_seconds, asked):
            has = {name: ray.cluster_resources().get(name, 0) for name in each}
            raise InputError(
                f"Ray found no room for run.ranks = {config.run.ranks}{workers} actors of {_told(each)} within "
                f"run.timeout_seconds = {config.run.timeout_seconds:g}; the cluster has {_told(has)} in all: "
                "wait until they are free, take fewer ranks, or add nodes"
            )
        yield group
    finally:
        remove_placement_group(group)


def _workers(config: Config) -> int:
    return config.run.rollout_workers if config.miles.fully_async else 0


def _needs(config: Config) -> dict[str, float]:
    """Return what Ray sets aside for one rank."""
    gpu = {"GPU": 1.0} if config.run.backend == "nccl" else {}
    return {"CPU": float(config.run.threads_per_rank), **gpu}


def _told(resources: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in resources.items())


def _actor(ray: ModuleType, config: Config, group: Any, rank: int) -> Any:
    threads = {"max_concurrency": THREADS} if config.miles.fully_async else {}
    return ray.remote(**_placed(config, group, rank), **threads)(Rank).remote()


def _worker(ray: ModuleType, config: Config, group: Any, slot: int) -> Any:
    from pack_miles.asynchronous.worker import RolloutWorker

    return ray.remote(**_placed(config, group, config.run.ranks + slot))(RolloutWorker).remote(config)


def _placed(config: Config, group: Any, place: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = _needs(config)
    return {
        "num_cpus": needs["CPU"],
        "num_gpus": needs.get("GPU", 0),
        "max_restarts": 0,  # a rank that starts anew finds no one to meet; a run goes on from its checkpoint
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
    }


def _watch(ray: ModuleType, runs: Sequence[Any], grace: float, asked: Event, dealer: Dealer | None) -> Outcome:
    """Wait for all ranks to end, and no longer than `grace` once one has failed; say what each said.

    Meanwhile rollouts are dealt out, where workers make them.
    """
    statuses: dict[int, int] = {}
    deaths: list[str] = []
    left, deadline = list(runs), math.inf
    while left and (remaining := deadline - time.monotonic()) > 0:
        others = dealer.refs if dealer else []
        done, _ = ray.wait([*left, *others], num_returns=1, timeout=min(remaining, LOOK))
        if asked.is_set():
            raise Asked
        for run in done:
            if dealer and run not in left:
                dealer.heard(run)
                continue
            left.remove(run)
            rank = runs.index(run)
            try:
                statuses[rank], said = ray.get(run)
            except ray.exceptions.RayError as error:
                statuses[rank], said = 1, ""
                deaths.append(f"rank {rank} died: {_cause(error)}")
            sys.stderr.write(said)
            if statuses[rank]:
                deadline = min(deadline, time.monotonic() + grace)
    return Outcome(
        tuple(statuses.get(rank) for rank in range(len(runs))), tuple(deaths), dealer.about if dealer else ""
    )


def _cause(error: Exception) -> str:
    """Return what Ray says of a lost actor, on one line and without its advice."""
    lines = [line.strip() for line in str(error).splitlines()]
    detail = [line for line in lines if "exit type" in line.lower() or "memory" in line.lower()]
    return (detail or lines or [type(error).__name__])[0][:200]


def _end(ray: ModuleType, actors: Sequence[Any], places: Sequence[Place]) -> None:
    """End every actor; what an actor on this machine leaves standing is ended by its own id."""
    here = ray.get_runtime_context().get_node_id()
    with _held([place.pid for place in places if place.node == here]) as processes:
        for actor in actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
        deadline = time.monotonic() + GONE
        while processes and time.monotonic() < deadline and not all(map(_over, processes)):
            time.sleep(0.02)
        for process in processes:
            with suppress(ProcessLookupError):  # a stopped process hears nothing but this
                signal.pidfd_send_signal(process, signal.SIGKILL)


@contextmanager
def _held(pids: Sequence[int]) -> Iterator[list[int]]:
    """Hold processes by descriptors, which no later process of the same id can be taken for (on Linux)."""
    descriptors = []
    try:
        for pid in pids if sys.platform == "linux" else ():
            with suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(pid))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _over(process: int) -> bool:
    """Return whether a process held by its descriptor has ended: then the descriptor can be read."""
    import select

    return bool(select.select([process], [], [], 0)[0])
