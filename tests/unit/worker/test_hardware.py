import os
import platform

import torch

from cluster.worker.hardware import device_of, hardware_of


def test_a_cpu_is_known_by_the_threads_of_a_step_and_taken_by_its_cores():
    cpu = torch.device("cpu")
    assert hardware_of(cpu) == f"cpu, {torch.get_num_threads()} threads"
    assert hardware_of(cpu, num_ranks=2) == f"2 x {hardware_of(cpu)}"
    assert platform.node() in device_of(cpu)
    cores = os.sched_getaffinity(0)
    assert all(str(core) in device_of(cpu) for core in cores)
