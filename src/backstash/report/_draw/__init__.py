"""The autograd graph as a picture.

A drawing is made in steps, each in a file that does not depend on the files after it:

====================================  =====================================================================
``_records``, ``_text``               the records of a drawing, and its texts
``_held``, ``_facts``                 the graph, read once into plain facts
``_tree``, ``_repeats``               runs of nodes: by module, repeated, folded until readable
``_drafts``                           boxes and frames, with the nodes and leaves that each stands for
``_tensors``                          the rows of saved tensors in boxes, and the notes
``_assemble``                         the records of a drawing
``_colors``                           the colours and the legend
``_outline``, ``_dot``                the drawing as text; in the DOT language
``_svg``                              the drawing as SVG and HTML, by Graphviz
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
