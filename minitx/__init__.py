"""minitx: a mini-transformer whose attention is a building block to swap.

Importing it imports torch and nothing that touches a GPU.
"""

__version__ = "0.1.0"
