"""One rank of `stage=plan`."""

from pipeline.launch.worker import stage_main

if __name__ == "__main__":
    stage_main("plan", "pipeline.planning.hours")
