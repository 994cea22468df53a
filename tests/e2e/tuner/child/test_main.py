"""Limits that a measuring process sets on itself."""

import json
import subprocess
import sys

from tuner.sandbox.confinement import MEMORY_SHARE, memory_bytes
from tuner.sandbox.lockdown import FIRST_TO_GO

#: The process itself, but for what it would measure: it tells of its bounds instead. The bound is for good: last.
SCRIPT = """
import os, resource
from tuner.child import main as child
from tuner.measuring.protocol import Job
from tuner.records import Failure, FailureKind, Phase
def told(job):
    score = open("/proc/self/oom_score_adj").read().strip()
    reason = f"{score} {resource.getrlimit(resource.RLIMIT_DATA)[0]}"
    return Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason=reason)
child.inspect_workload = told
for workload, confine in (("train.py:make", "1"), ("a.ksn", "0")):
    os.environ["KITSUNE_CONFINE"] = confine
    channel = child.Channel(1)
    channel.answer(child.run(Job(kind="inspect", workload=workload, device="cpu"), channel), {})
os.environ["KITSUNE_CONFINE"] = "1"
child.main(1)
"""


def test_a_measuring_process_is_killed_first_and_its_memory_is_limited_on_a_cpu():
    job = json.dumps({"kind": "inspect", "workload": "a.ksn", "device": "cpu"})
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=job, capture_output=True, text=True, check=True)
    reasons = [json.loads(line)["failure"]["reason"].split() for line in done.stdout.splitlines() if "failure" in line]
    (_, own), (_, unconfined), (score, strangers) = reasons
    bound = str(int(MEMORY_SHARE * memory_bytes()))
    assert (score, strangers) == (str(FIRST_TO_GO), bound)
    assert bound not in (own, unconfined)
