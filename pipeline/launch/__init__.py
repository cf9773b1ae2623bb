"""The launcher: from one command to the processes of each stage.

command.py    the command: configuration, run folder, the stages that have to run
folder.py     the run folder: its name, its lock
manifest.py   the record of the stages of a run, and which of them must run
fingerprint.py, stage_inputs.py    what a stage's result depends on: settings, data, models
ranks.py      the number of processes and their ranks: this machine, torchrun, Slurm
processes.py  start the ranks of one stage, watch them, forward signals
control.py    messages between the launchers of several machines, and the verdict on a stage
watchdog.py   what the ranks do, and which rank the others wait for
worker.py     the process of one rank; `stage_main` is the `__main__` of a stage
failure.py    exit statuses, causes, and advice on errors
summary.py    the text that ends a run
"""
