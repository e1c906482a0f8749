"""Rows that continue others, joined: the values of each row's chain, from its root to itself, in one block.

Each value of the forest was stored and sent once. The rows are copied here once, when their column is first used, into
a block as a put would have written it. So all that reads columns reads these as any others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import Corruption
from transferqueue.limits import ALIGNMENT
from transferqueue.schema import Field, layout
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.gather import gather_values, row_edges, row_offsets
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.elements.dtypes import I64, U8
from transferqueue.storage.memory.private_pages import memory_address


class Tree(NamedTuple):
    """The values of one column as a forest, each stored value once (`Batch.tree`).

    Args:
        nodes: the stored values: what each row has beyond the row that it continues. Parents come before children.
        parents: the node that each node continues, int64 ``[nodes]``; -1: none.
        node_of_row: the node of each row, int64 ``[rows]``. The row's value is that of all nodes from the root of this
            one to itself, one after another.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["ids"])])
        ...     prompt = table.put(ids=[[1, 2, 3]])
        ...     answers = table.put(ids=[[4], [5, 6]], parent=prompt[0])
        ...     rows = table.read(answers)
        ...     print(rows["ids"].list())
        ...     tree = rows.tree("ids")
        ...     print(tree.nodes.list(), tree.parents, tree.node_of_row)
        [[1, 2, 3, 4], [1, 2, 3, 5, 6]]
        [[1, 2, 3], [4], [5, 6]] [-1  0  0] [1 2]
    """

    nodes: Column
    parents: I64
    node_of_row: I64


class _Block(NamedTuple):
    block: int
    nbytes: int
    rows: int
    fields: list[str]
    counts: list[int]


def join(field: Field, nodes: RowPlacement, parents: I64, node_of_row: I64) -> RowPlacement:
    """The rows (at least one) of a ragged field, each with all that comes before it, in memory of their own.

    Args:
        field: whose values are joined.
        nodes: the places of the values, parents before children.
        parents: of each node; -1: none.
        node_of_row: of each row.

    Raises:
        Corruption: another process wrote a forest that is none, or offsets that point outside their block.
        BatchEnded: the memory of the nodes was released.
    """
    check_forest(field, nodes.rows, parents, node_of_row)
    levels = [node_of_row]
    while (above := np.where(levels[-1] >= 0, parents[levels[-1]], -1)).max() >= 0:
        levels.append(above)
    chains = np.stack(levels[::-1], axis=1)
    order, ends = chains[chains >= 0], row_offsets((chains >= 0).sum(axis=1))
    chosen = nodes.select(order)
    edges = row_edges(field, chosen)
    offsets = row_offsets(edges.last - edges.first)[ends]
    (span,), nbytes = layout([field], len(node_of_row), [int(offsets[-1])])
    memory = _aligned(nbytes)
    memory[span.offsets : span.offsets + 8 * len(offsets)].view(np.int64)[:] = offsets
    place = memory[span.values : span.values + int(offsets[-1]) * field.row_bytes]
    values = gather_values(field, chosen, edges, 0, len(order), lambda nbytes: place[:nbytes])
    if values.size and memory_address(values) != memory_address(place):
        place[:] = values
    block = _Block(0, nbytes, len(node_of_row), [field.name], [int(offsets[-1])])
    return RowPlacement.of_run(MappedBlocks([block], [memory], {field.name: field}), 0, 0, len(node_of_row))


def along_chains(of_node: NDArray[Any], parents: I64, combine: np.ufunc = np.add) -> NDArray[Any]:
    """Combine these numbers of the nodes of a forest from each root down to each node, in as many steps as their number
    has binary digits."""
    combined, above = of_node.copy(), parents.copy()
    for _ in range(len(parents).bit_length()):
        at = np.flatnonzero(above >= 0)
        combined[at] = combine(combined[at], combined[above[at]])
        above[at] = above[above[at]]
    return combined


def check_forest(field: Field, nodes: int, parents: I64, node_of_row: I64) -> None:
    """Raise `Corruption` unless parents come before their children, and each row has a node."""
    if (
        len(parents) != nodes
        or (parents < -1).any()
        or (parents >= np.arange(nodes)).any()
        or (node_of_row < 0).any()
        or (node_of_row >= nodes).any()
    ):
        raise Corruption(f'field "{field.name}": the rows of a reply continue values that are not there')


def _aligned(nbytes: int) -> U8:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory_address(memory) % ALIGNMENT
    return memory[start : start + nbytes]
