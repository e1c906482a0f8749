"""Finds a deployment in a Ray cluster by its name, and asks its actors where their servers listen.

Clients (`connect`) and the actors of shards do this; only `deploy` makes anything.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from transferqueue.cluster.on_ray.messages import REPLY, DeploymentName, DeployRefused, Endpoints, read
from transferqueue.errors import NotFound, Unreachable, UsageError, from_wire
from transferqueue.lazy import install_line
from transferqueue.transport import this_host
from transferqueue.transport.security.keys import ClientKeys, read_token

T = TypeVar("T")

DEPLOY_S: Final = 60.0
"""Ray starts a worker in a second or two; on a busy cluster it may have to wait for one."""


def server_addresses(
    named: DeploymentName, timeout_s: float, *, near: bool
) -> dict[str, tuple[str, ClientKeys | None]]:
    """The address of each server of this deployment, as seen from this process, with the keys for it; by the server's
    name. Blocks for `timeout_s` seconds at most.

    Args:
        named: the deployment.
        timeout_s: seconds.
        near: give the socket of a server on this machine, if this process can open it; otherwise always tcp.

    Raises:
        NotFound: there is no such deployment; lists those of the cluster.
        Unreachable: an actor does not answer in time.
    """
    endpoints = _within(timeout_s, named, lambda: all_endpoints(join_ray(start=False), named, timeout_s))
    return {str(name): address_from_here(ways, near=near) for name, ways in endpoints.items()}


def _within(timeout_s: float, named: DeploymentName, ask: Callable[[], T]) -> T:
    """The result of `ask`, or its error. `Unreachable` after `timeout_s`: Ray itself looks for a lost cluster for 20 s
    and more. `ask` then goes on in a thread, which ends with the process at the latest."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            answer.set_exception(error)

    threading.Thread(target=run, name=f"transferqueue looks for {named}", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except FutureTimeout:
        if answer.done():
            raise
        raise Unreachable(
            f"no Ray cluster reported within {timeout_s:g} s where deployment {named} is; check that the cluster runs "
            "(ray status), or give timeout_s= more"
        ) from None


def all_endpoints(
    ray: Any, named: DeploymentName, timeout_s: float, role: str = "admin"
) -> dict[DeploymentName, Endpoints]:
    """The endpoints of every coordinator of a deployment, or of one coordinator if `named` is the name of one."""
    first = ask_endpoints(named, find_actor(ray, named), timeout_s, role)
    if first.seats == 1 or named.is_one_coordinator:
        return {named: first}
    rest = [named.of_coordinator(number) for number in range(2, first.seats + 1)]
    return {named.of_coordinator(1): first} | {
        name: ask_endpoints(name, find_actor(ray, name), timeout_s, role) for name in rest
    }


def address_from_here(endpoints: Endpoints, *, near: bool = True) -> tuple[str, ClientKeys | None]:
    """The server's socket if it is on this machine and this process can open it, else its tcp address with the keys of
    the token."""
    if near and endpoints.host == this_host() and os.access(endpoints.ipc.removeprefix("ipc://"), os.R_OK | os.W_OK):
        return endpoints.ipc, None
    token = read_token(endpoints.token)
    return token.address, token.keys


def join_ray(*, start: bool) -> Any:
    """The module ``ray``, after this process has joined a Ray cluster. With `start`, start a cluster on this machine if
    there is none."""
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError(
            f"the address names a deployment on Ray, and Ray is not installed here: {install_line('ray')}"
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address=None if start else "auto", configure_logging=False)
        except ConnectionError as error:
            raise Unreachable(
                f"this process belongs to no Ray cluster ({error}); call ray.init first, or start one with deploy_ray"
            ) from error
    return ray


def find_actor(ray: Any, named: DeploymentName) -> Any:
    """The handle of a deployment's actor; `NotFound` lists the named actors of the cluster."""
    try:
        return ray.get_actor(named.actor, namespace=named.namespace)
    except ValueError:
        actors = [
            str(DeploymentName(actor["namespace"], actor["name"]))
            for actor in ray.util.list_named_actors(all_namespaces=True)
        ]
        raise NotFound(
            f"deployment {named} does not exist in this Ray cluster; its named actors are "
            f"{', '.join(sorted(actors)) or 'none'}: make it with deploy_ray"
        ) from None


def ask_endpoints(named: DeploymentName, actor: Any, timeout_s: float, role: str = "admin") -> Endpoints:
    """The actor's endpoints for this role; raises its refusal."""
    with ray_errors_as_ours(named, timeout_s) as ray:
        reply = read(ray.get(actor.ways.remote(role), timeout=timeout_s), REPLY)
    if isinstance(reply, DeployRefused):
        raise from_wire(reply.error, reply.text)
    return reply


@contextmanager
def ray_errors_as_ours(named: DeploymentName, timeout_s: float) -> Iterator[Any]:
    """Gives the module ``ray``, and raises its errors about this deployment's actor as `Unreachable`."""
    import ray

    try:
        yield ray
    except ray.exceptions.GetTimeoutError:
        raise Unreachable(
            f"deployment {named} did not answer within {timeout_s:g} s; its actor waits for its node, for resources or "
            "for a restart: ray list actors says which"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise Unreachable(f"deployment {named} is dead, and Ray no longer starts it: {error}") from error
