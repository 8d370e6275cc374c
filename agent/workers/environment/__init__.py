"""The variables of a worker: torchrun's contract, and settings of torch and NCCL."""
