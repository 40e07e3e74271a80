"""The autograd graph, drawn.

A drawing is made in steps, each a file that knows nothing of those after it:

====================================  =====================================================================
``_names``, ``_held``, ``_facts``     the graph, read once into plain facts
``_tree``, ``_repeats``, ``_fold``    runs of nodes: by module, repeated, folded to what can be read
``_drafts``, ``_leaves``, ``_edges``  boxes, each knowing which nodes it stands for
``_tensors``, ``_notes``              what is written in them, and below them
``_assemble``, ``_records``           the records of a :class:`Drawing`
``_dot``                              as DOT
``_boxes``, ``_layout``, ``_layers``  what is written in each box, and where it goes, by ``_cells``,
                                      ``_order`` and ``_columns``
``_style``, ``_svg``, ``_page``       as SVG and HTML
====================================  =====================================================================
"""

from ._drawing import Drawing
from ._face import draw
from ._records import DrawnEdge, DrawnGroup, DrawnLeaf, DrawnNode, DrawnTensor, Place

__all__ = [
    "Drawing",
    "DrawnEdge",
    "DrawnGroup",
    "DrawnLeaf",
    "DrawnNode",
    "DrawnTensor",
    "Place",
    "draw",
]
