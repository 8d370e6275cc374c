"""Our rendezvous as a plug-in of stock torchrun (entry point `torchrun.handlers`)."""
