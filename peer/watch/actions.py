"""Actions of an operator on the page of `sotto watch --operate`: those of `sotto stop`, `leave`, `remove`, `reload`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from peer.errors import ConfigError, RemoteError, SecurityError, SottoError
from peer.ops import control
from peer.ops.collect import Member
from peer.watch.observer import Observer


async def act(observer: Observer, action: object, name: object) -> str:
    """Carry out an action of the page on the peer of that name, or on all; return the outcome as a sentence. Raises
    SottoError."""
    if action == "stop all" and name is None:
        return await _stop_all(observer)
    if not isinstance(action, str) or action not in _ACTIONS:
        raise ConfigError("is no action", key="action", valid=", ".join((*_ACTIONS, "stop all")))
    member = observer.member(name) if isinstance(name, str) else None
    if member is None:
        raise ConfigError("is no peer that can be asked", key="peer")
    return await _ACTIONS[action](member)


def check_operator(observer: Observer) -> None:
    """Raise SecurityError unless the operator's certificate is at hand; ConfigError where there is nobody to ask."""
    if observer.kind == "simulation":
        raise ConfigError("a simulation has no peers that could be asked", key="--operate")
    for member in observer.members:
        if not control.may_operate(member.config, member.base):
            raise SecurityError("--operate needs operator.pem and operator.key beside ca.pem, or in the folder above")


async def _stop(member: Member) -> str:
    await control.ask(member.config, member.base, member.entry, "stop")
    return f"{member.name} stops after this round"


async def _leave(member: Member) -> str:
    answer = await control.ask(member.config, member.base, member.entry, "leave")
    return f"{member.name} leaves before round {answer['from']}"


async def _remove(member: Member) -> str:
    answer = await control.remove(member.config, member.base, member.name)
    return f"{member.name} is excluded from round {answer['from']} on"


async def _reload(member: Member) -> str:
    answer = await control.ask(member.config, member.base, member.entry, "reload")
    added, removed = list(answer.get("added", ())), list(answer.get("removed", ()))
    changes = [f"added {', '.join(map(str, added))}"] if added else []
    changes += [f"removed {', '.join(map(str, removed))}"] if removed else []
    return f"{member.name} has read its list of peers again: {'; '.join(changes) or 'nothing changed'}"


async def _stop_all(observer: Observer) -> str:
    async def stop(member: Member) -> SottoError | None:
        try:
            await _stop(member)
        except SottoError as error:
            return error
        return None

    asked = [member for member in observer.members if member.answer is not None]
    errors = [error for error in await asyncio.gather(*map(stop, asked)) if error is not None]
    if errors:
        raise RemoteError(f"{len(asked) - len(errors)} of {len(asked)} peers stop after this round; {errors[0]}")
    return f"{len(asked)} peers stop after this round"


_ACTIONS: Mapping[str, Callable[[Member], Awaitable[str]]] = {
    "stop": _stop,
    "leave": _leave,
    "remove": _remove,
    "reload": _reload,
}
