"""`python -m step3_ppo KEY=VALUE ...`"""

from pipeline.launch.worker import stage_main

if __name__ == "__main__":
    stage_main("ppo", "step3_ppo.train")
