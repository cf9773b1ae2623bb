"""From one command to the processes of each stage, and back: `stage_main` is a stage's `__main__`.

command.py    the command line: configuration, run folder, what has to run, the closing words
folder.py     the run folder: its name, its lock
ranks.py      how many processes, and who they are: this machine, torchrun, Slurm
processes.py  start the ranks of one stage, watch them, forward signals
control.py    what the launchers of several machines tell one another
worker.py     inside a rank
failure.py    what launcher and worker agree on when something goes wrong
"""

from pipeline.launch.worker import stage_main

__all__ = ["stage_main"]
