"""What can go wrong with checkpoints and samples, split by what the caller should do.

    CheckpointError            something about checkpoints is wrong; the text says what and what to do next
      NoUsableCheckpoint       checkpoints exist, none verifies: a person decides, training must not start at step 0
      CheckpointMismatch       the file is whole but is not a checkpoint of this script: fix the script or the directory
        OtherWorldSize         it holds what each rank has for itself, of another number of ranks: start as many again
      StepNotGrowing           `save` was asked for an older step than the newest one: fix the training loop
      NotReplicated            a state is not the same on all ranks: shard it, or declare it rank 0's or each rank's
        Sharded                it is spread over ranks in a way that is not carried: the text says what is
      NotPlainData             a state cannot be loaded again without running code: fix that object's `state_dict`
      DirectoryNotShared       a sharded state was to be saved where not all nodes see the same files: use another place
      SaveFailed               the checkpoint was refused too often: look at the disk
        NotSaved               not yet too often: `save` returns False
        Unconfirmed            the store is away: `save` returns False, and the agent judges how long that may last
      Fenced                   another generation has begun: let this process end, its agent is about to stop it
      OtherRun                 another job uses the same directory: end one of the two, or give each its own
      BadCheckpoint            one checkpoint on disk does not verify; `load` goes on to the next older one
    ClusterEnvironmentError    the process cannot tell its rank: the text says which variable to set
    SamplerError               the training loop uses `ElasticSampler` in a way that loses samples: fix the loop
      SamplerMismatch          the state is of another dataset or order: give the sampler the same ones
    MeshMismatch               no mesh of the asked form has as many ranks as the world: the text says which numbers fit
    UnsupportedTraining      a library's trainer is set up so that no callback can carry it: the text says what to set
    LibraryMissing           the module is for a library that is not installed: install it

All checkpoint errors but `BadCheckpoint` leave `Checkpointer` on every rank together, with the same type and the same
reason.
"""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """Base of everything `Checkpointer` raises."""


class NoUsableCheckpoint(CheckpointError):
    """Checkpoints exist on some rank and none verifies; starting again from step 0 is a person's decision."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is whole, but its names or shapes are not those of this script's state."""


class OtherWorldSize(CheckpointMismatch):
    """The checkpoint holds each rank's own state, of another number of ranks, and no rule says how to reshape it."""


class StepNotGrowing(CheckpointError):
    """The step to save is not newer than the newest committed one."""


class NotReplicated(CheckpointError):
    """Ranks differ where they should be alike: rank 0's state would be loaded into all of them."""


class Sharded(NotReplicated):
    """Spread over ranks in a way that is not carried, by the types of its objects: no restart changes that."""


class NotPlainData(CheckpointError):
    """The state holds objects that `torch.load(weights_only=True)` refuses, or tensors that are not carried."""


class DirectoryNotShared(CheckpointError):
    """The nodes do not share the checkpoint directory, and each would write its shards into its own."""


class SaveFailed(CheckpointError):
    """The checkpoint could not be made durable; the older ones are untouched."""


class Unconfirmed(SaveFailed):
    """It is unknown whether this process's generation may still commit. Never leaves `save`."""


class Superseded(StepNotGrowing):
    """An earlier generation of this run came further, and this one goes on from elsewhere. Never leaves `save`."""


class NotSaved(SaveFailed):
    """The checkpoint was refused, and not yet too often. Never leaves `save`."""


class Fenced(CheckpointError):
    """This process's generation is over, so it must not commit: others have gone on from an older checkpoint."""


class OtherRun(CheckpointError):
    """Another run has the directory, or has saved there what this one does not come from; nothing was overwritten."""


class BadCheckpoint(CheckpointError):
    """The checkpoint of `step` at `path` is not what was committed, because of `reason`."""

    def __init__(self, step: int, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.step = step
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadCheckpoint], tuple[int, str, str]]:
        """DCP sends the errors of one rank to all others."""
        return type(self), (self.step, self.path, self.reason)


class SamplerError(RuntimeError):
    """Base of everything `ElasticSampler` raises."""


class SamplerMismatch(SamplerError):
    """The state is not of an epoch that this sampler could go on with. Out of `Checkpointer.load` it comes as the
    reason of a CheckpointMismatch."""


class ClusterEnvironmentError(RuntimeError):
    """The variables of the launcher do not say which rank of which job this process is."""


class MeshMismatch(RuntimeError):
    """The dimensions that a mesh is to have do not divide the number of ranks; the same on all of them."""


class UnsupportedTraining(RuntimeError):
    """A library's trainer is set up in a way that cannot be carried through a restart; nothing was loaded."""


class LibraryMissing(ImportError):
    """The library that a module of ours is for is not installed."""
