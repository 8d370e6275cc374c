"""The checkpoint directory of `Checkpointer`, for those who save and load with `torch.distributed.checkpoint` (DCP).

    dcp.save(state, storage_writer=ElasticStorageWriter("runs/x", step=120, keep=2))

    reader = ElasticStorageReader("runs/x")
    if reader.step is not None:
        dcp.load(state, storage_reader=reader)

`dcp.async_save` takes the writer, too. Under an agent each rank copies what it is to write into its node's memory, from
where it reaches the disk, and replicas on other nodes, while training goes on. Each save fills a directory of its own;
its manifest appears last, behind the fence, and older ones are pruned. What is read is verified, and no `.metadata` is
unpickled. DCP raises its own `CheckpointException`, on all ranks; its `failures` have the errors of
`elastic_agent.worker.errors`, by rank.
"""

from .reader import ElasticStorageReader
from .writer import ElasticStorageWriter

__all__ = ["ElasticStorageReader", "ElasticStorageWriter"]
