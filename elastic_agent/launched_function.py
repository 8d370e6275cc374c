"""What a worker of `elastic_agent.launcher` runs, with the folder of function and results in its environment. Its
argument, the function's name, is for the agents, which compare what nodes run.

The folder is private to the user who called the launcher, who also wrote what is unpickled here.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from .launcher import FOLDER, FUNCTION, PATH, RESULTS


@record
def main(folder: Path) -> None:
    # A module beside the caller's script is no less there for its workers.
    sys.path += [place for place in json.loads((folder / PATH).read_text()) if place not in sys.path]
    function, args = pickle.loads((folder / FUNCTION).read_bytes())
    result = function(*args)
    results = folder / f"{RESULTS}{os.environ['ELASTIC_AGENT_GENERATION']}"
    results.mkdir(exist_ok=True)
    file = results / os.environ["RANK"]
    scratch = file.with_name(f".{file.name}")
    try:
        scratch.write_bytes(pickle.dumps(result))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        scratch.unlink(missing_ok=True)
        problem = f"the result of rank {file.name}, a {type(result).__name__}, cannot be sent back"
        raise TypeError(f"{problem}: {error}") from error
    scratch.rename(file)


if __name__ == "__main__":
    main(Path(os.environ[FOLDER]))
