"""`python -m step1_sft KEY=VALUE ...`"""

from pipeline.launch.worker import stage_main

if __name__ == "__main__":
    stage_main("sft", "step1_sft.train")
