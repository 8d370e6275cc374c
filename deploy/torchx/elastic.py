"""A component of TorchX: a job of elastic-agent on any of its schedulers.

    torchx run -s local_cwd elastic.py:ddp -j 1x2 --script train.py -- --lr 0.1
    torchx run -s kubernetes elastic.py:ddp -j 1:3x8 --script train.py --rdzv_endpoint etcd://etcd:2379

The arguments are those of TorchX's own `dist.ddp`, which makes the job; what differs is the command on each node.
TorchX reads this file's syntax tree, hence the spelling of the types.
"""

import shlex
from typing import Dict, List, Optional

import torchx
from torchx import specs
from torchx.components import dist


def ddp(
    *script_args: str,
    script: Optional[str] = None,
    m: Optional[str] = None,
    image: str = torchx.IMAGE,
    name: str = "/",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    j: str = "1x2",
    env: Optional[Dict[str, str]] = None,
    max_retries: int = 0,
    rdzv_port: int = 29500,
    rdzv_backend: str = "c10d",
    rdzv_endpoint: Optional[str] = None,
    mounts: Optional[List[str]] = None,
    debug: bool = False,
    tee: int = 0,
) -> specs.AppDef:
    """Elastic training by elastic-agent, one agent per node.

    Options of elastic-agent beyond those below are variables of their names: --env ELASTIC_AGENT_STOP_GRACE=60s.

    Args:
        script_args: arguments of the script or module
        script: script to run within the image
        m: python module to run
        image: image, which has elastic-agent in it
        name: ``{experimentname}/{runname}``, either may be left out; without a run name that of the script or module
        h: a registered named resource; takes precedence over cpu, gpu and memMB
        cpu: number of CPUs per node
        gpu: number of GPUs per node
        memMB: memory per node in MB
        j: [[{min_nodes}:]{nodes}x]{workers per node}; with min_nodes training goes on while so many nodes are there
        env: environment variables (ENV1=v1,ENV2=v2)
        max_retries: how often the scheduler may replace a lost node
        rdzv_port: port of the c10d store on the first node; of no meaning for one node
        rdzv_backend: c10d: the first node hosts the store; etcd: see rdzv_endpoint
        rdzv_endpoint: the store, instead of the first node: HOST:PORT, or etcd://HOST:PORT
        mounts: mounts into the container (type=<bind/volume>,src=/host,dst=/job[,readonly])
        debug: set torch's variables for debugging
        tee: streams that go to files besides the console. 0: none, 1: stdout, 2: stderr, 3: both
    """
    min_nodes, max_nodes, workers, _ = dist.parse_nnodes(j)
    if rdzv_backend.startswith("etcd") and rdzv_endpoint is None:
        raise ValueError(f"--rdzv_backend {rdzv_backend} needs --rdzv_endpoint HOST:PORT, where etcd is")
    app = dist.ddp(
        *script_args,
        script=script,
        m=m,
        image=image,
        name=name,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        j=j,
        env=env,
        max_retries=max_retries,
        rdzv_port=rdzv_port,
        mounts=mounts,
        debug=debug,
    )
    words = [f"--min-nodes={min_nodes}", f"--max-nodes={max_nodes}", f"--nproc-per-node={workers}"]
    words += [f"--rdzv-id={specs.macros.app_id}"]
    words += [f"--rdzv-backend={rdzv_backend}"] if rdzv_backend != "c10d" else []
    words += [f"--tee={tee}"] if tee else []
    words += ["-m", m] if m is not None else [str(script)]
    # Some schedulers name the first node on all nodes but that one. bash reads the variable, on the node.
    first_node = f'"$${{{specs.macros.rank0_env}:=localhost}}:{rdzv_port}"'
    store = shlex.quote(rdzv_endpoint) if rdzv_endpoint is not None else first_node
    rendezvous = f"--rdzv-endpoint={store} " if rdzv_endpoint is not None or max_nodes > 1 else ""
    (role,) = app.roles
    role.args = ["-c", f"exec elastic-agent {rendezvous}{shlex.join([*words, *script_args])}"]
    role.retry_policy = specs.RetryPolicy.REPLICA  # the agents that are left take in the new one
    return app
