"""Import circles: sets of modules, or of entries of one folder, of which each reaches each other by imports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tests.house.source import KINDS, Module

Graph = dict[str, set[str]]


def graph(modules: Mapping[str, Module], kinds: Collection[str] = KINDS) -> Graph:
    """Who imports whom, by imports of these kinds."""
    edges: Graph = {name: set() for name in modules}
    for name, module in modules.items():
        for imported, kind in module.imports():
            target = imported if imported in modules else imported.rpartition(".")[0]
            if kind in kinds and target in modules and target != name:
                edges[name].add(target)
    return edges


def within_folders(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Circles among the entries of each folder. An entry that is a folder stands for all that is in it."""
    found = []
    for folder in sorted({name.rpartition(".")[0] for name in edges if "." in name}):
        siblings: Graph = {}
        for name, imported in edges.items():
            entry = _entry(folder, name)
            if entry:
                others = {_entry(folder, one) for one in imported}
                siblings.setdefault(entry, set()).update(others - {"", entry})
        found += strongly_connected(siblings)
    return found


def imports_between(edges: Mapping[str, Iterable[str]], entries: Collection[str]) -> list[str]:
    """Which module of one entry imports which of another, the rarest pair of entries first: it is the easiest to
    undo."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for name, imported in edges.items():
        for other in imported:
            pair = _owner(entries, name), _owner(entries, other)
            if all(pair) and pair[0] != pair[1]:
                pairs.setdefault(pair, []).append(f"{name} > {other}")
    return [one for found in sorted(pairs.values(), key=lambda found: (len(found), found)) for one in sorted(found)]


def _owner(entries: Collection[str], name: str) -> str:
    return next((entry for entry in entries if name == entry or name.startswith(entry + ".")), "")


def _entry(folder: str, name: str) -> str:
    return folder + "." + name[len(folder) + 1 :].partition(".")[0] if name.startswith(folder + ".") else ""


def strongly_connected(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan 1972), largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return sorted(found, key=lambda circle: (-len(circle), circle))


def shortest(edges: Mapping[str, Iterable[str]], circle: Collection[str]) -> list[str]:
    """The nodes of a shortest circle within a strongly connected component, in order."""
    best = list(circle)
    for start in sorted(circle):
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            for other in sorted(set(edges.get(way[-1], ())) & set(circle)):
                if other == start and len(way) < len(best):
                    best = way
                if other not in seen:
                    seen.add(other)
                    ways.append([*way, other])
    return best
