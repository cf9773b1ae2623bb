"""`python -m step2_reward KEY=VALUE ...`"""

from pipeline.launch.worker import stage_main

if __name__ == "__main__":
    stage_main("reward", "step2_reward.train")
