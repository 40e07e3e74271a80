"""The autograd graph as a picture.

A drawing is made in steps, each a file that knows nothing of those after it:

====================================  =====================================================================
``_records``, ``_text``               what a drawing consists of, and its words
``_held``, ``_facts``                 the graph, read once into plain facts
``_tree``, ``_repeats``               runs of nodes: by module, repeated, folded to what can be read
``_drafts``                           boxes and frames, each knowing which nodes and leaves it stands for
``_tensors``                          what is written in boxes of saved tensors, and below them
``_assemble``                         the records of a drawing
``_boxes``                            what is written in each box, and how large that makes it
``_layers``, ``_layout``              where boxes, frames and edges go
``_colors``                           which colours, and what they stand for
``_dot``, ``_svg``                    the drawing as DOT; as SVG and HTML
``_drawing``                          ``draw`` and :class:`Drawing`
====================================  =====================================================================
"""

from ._drawing import Drawing, draw
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
