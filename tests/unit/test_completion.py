"""What `elastic-agent --print-completion bash` prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

from elastic_agent.agent.configuration.config import OPTIONS
from elastic_agent.agent.configuration.parse import OptionSource
from elastic_agent.cli import bash_completion


def test_the_completion_knows_every_option_and_command(tmp_path: Path) -> None:
    (tmp_path / "elastic-agent.bash").write_text(bash_completion())
    for option in OPTIONS:
        if OptionSource.CLI in option.sources:
            assert f"--{option.name}" in bash_completion()
    asked = (
        "source $0; how=$(complete -p elastic-agent); how=${{how#complete}};"
        ' eval "compgen ${{how% elastic-agent}} -- {}"'
    )
    for word, answer in (("--min", "--min-nodes"), ("exc", "exclude"), ("--rdzv-e", "--rdzv-endpoint")):
        command = ["bash", "-c", asked.format(word), str(tmp_path / "elastic-agent.bash")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        assert (done.stdout.strip(), done.stderr) == (answer, "")
