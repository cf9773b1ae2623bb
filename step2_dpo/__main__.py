"""Run the DPO stage: `python -m step2_dpo KEY=VALUE ...`."""

from pipeline.launch.worker import stage_main

if __name__ == "__main__":
    stage_main("dpo", "step2_dpo.train")
