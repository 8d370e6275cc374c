"""elastic-agent: one fault-tolerant elastic training agent per node.

The folders of this package are links to the folders beside it, so that the tree's top level shows the
architecture: `rendezvous` decides which nodes form one world, `agent` starts and stops this node's workers,
`health` shows what the others report, and `worker` is the library inside the training process. `deploy` has files.
"""

__version__ = "0.1.0"
