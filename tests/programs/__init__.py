"""A small language of autograd programs, run under a stash in many ways and judged against plain PyTorch.

``operations``, ``functions``, ``acts``   what a step of a program may do
``run``                                   one run of a program
``knowable``                              what a write that raises no version makes unknowable
``ways``                                  the stashes that a program is run under
``judge``                                 equal to the bit, or an error where plain PyTorch raises
``search``                                hypothesis makes programs, and the smallest that fails
"""
