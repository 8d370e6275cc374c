"""The variables of a worker: torchrun's contract, settings of torch and NCCL, timeouts, and who chose what."""
