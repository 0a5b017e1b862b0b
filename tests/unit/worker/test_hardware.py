import torch

from cluster.worker.process import hardware_of


def test_a_cpu_is_known_by_the_threads_of_a_step():
    cpu = torch.device("cpu")
    assert hardware_of(cpu) == f"cpu, {torch.get_num_threads()} threads"
    assert hardware_of(cpu, num_ranks=2) == f"2 x {hardware_of(cpu)}"
