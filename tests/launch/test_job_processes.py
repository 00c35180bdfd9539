"""Which processes make up a job, and their votes: without JAX, threads play the processes."""

import socket
import threading
from types import SimpleNamespace

import pytest

from deepinfer_jax.launch.processes import detect
from deepinfer_jax.launch.votes import SocketDPGroup, VoteFailed, join_votes, listen_for_votes

TOKEN = b"t" * 16


def flags(coordinator=None, num_processes=None, process_id=None):
    return SimpleNamespace(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id
    )


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [
        (flags(), {}, None),
        (flags("h:1", 1, 0), {}, None),
        (flags("h:1", 4, 3), {"SLURM_NTASKS": "9", "SLURM_STEP_ID": "0"}, ("h:1", 4, 3)),
        (
            flags(),
            {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "lead", "LWS_WORKER_INDEX": "1"},
            ("lead:9521", 2, 1),
        ),
        (
            flags(),
            {"LWS_GROUP_SIZE": "1", "LWS_LEADER_ADDRESS": "lead", "LWS_WORKER_INDEX": "0"},
            None,
        ),
        (
            flags(),
            {
                "JOB_COMPLETION_INDEX": "2",
                "DEEPINFER_NUM_PROCESSES": "3",
                "DEEPINFER_COORDINATOR": "pod:7",
            },
            ("pod:7", 3, 2),
        ),
        (flags(), {"JOB_COMPLETION_INDEX": "0"}, None),
        (flags(), {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, "jax"),
        (flags(), {"SLURM_NTASKS": "4"}, None),  # an allocation's shell, not a step
        (flags(), {"OMPI_COMM_WORLD_SIZE": "2"}, "jax"),
        (flags(), {"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_detection(given, env, expected):
    found = detect(given, env)
    if expected == "jax":
        assert found == {}
    elif expected is None:
        assert found is None
    else:
        assert (
            found["coordinator_address"],
            found["num_processes"],
            found["process_id"],
        ) == expected


def test_half_a_set_of_flags_is_refused():
    with pytest.raises(ValueError, match=r"missing \['--process-id'\]"):
        detect(flags("h:1", 2), {})
    with pytest.raises(ValueError, match="process 5 of a job of 2"):
        detect(flags("h:1", 2, 5), {})


def connect(count, deadline=5.0):
    """Groups of `count` processes, over loopback."""
    server = socket.create_server(("127.0.0.1", 0))
    address, groups = server.getsockname(), [None] * count

    def join(i):
        groups[i] = join_votes(address, i, count, TOKEN, deadline, 5.0)

    threads = [threading.Thread(target=join, args=(i,)) for i in range(1, count)]
    for t in threads:
        t.start()
    groups[0] = listen_for_votes(count, TOKEN, server, deadline, 5.0)
    for t in threads:
        t.join()
    return groups


def run(groups, function):
    """function(process, group) in a thread each; results or exceptions, by process."""
    results = [None] * len(groups)

    def one(i):
        try:
            results[i] = function(i, groups[i])
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(groups))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return results


@pytest.mark.parametrize("count", [2, 5])
def test_everybody_gets_the_minimum_of_every_vote(count):
    groups = connect(count)
    for i, g in enumerate(groups):
        g.bind(2 * count, [2 * i, 2 * i + 1])
    results = run(
        groups,
        lambda i, g: [g.all_reduce_min([(i * 7 + n) % 11, (i * 5 + n) % 13]) for n in range(200)],
    )
    expected = [
        min(min((i * 7 + n) % 11, (i * 5 + n) % 13) for i in range(count)) for n in range(200)
    ]
    assert results == [expected] * count
    assert all(g.votes == 200 for g in groups)


def test_the_least_number_of_blocks_is_used_and_what_must_be_equal_is_compared():
    groups = connect(3)
    assert run(groups, lambda i, g: g.agree_min(100 - i)) == [98] * 3
    assert run(groups, lambda i, g: g.must_agree("dtype", "float32")) == [None] * 3
    errors = run(groups, lambda i, g: g.must_agree("block_size", 32 if i == 1 else 16))
    expected = (
        "the processes of a job must agree on block_size: {} in process {}, from 16 to 32 in"
        " the job"
    )
    assert [str(e) for e in errors] == [expected.format(v, i) for i, v in enumerate((16, 32, 16))]
    errors = run(groups, lambda i, g: g.must_agree("max_model_len", None if i == 2 else 256))
    assert all(isinstance(e, ValueError) for e in errors)


def test_a_process_that_ends_is_named_by_everybody():
    groups = connect(3, deadline=1.0)
    groups[2].close()
    results = run(groups[:2], lambda i, g: g.all_reduce_min([1]))
    assert isinstance(results[0], VoteFailed) and "process 2 is gone" in str(results[0])
    groups[0].close()  # as its process's end does
    with pytest.raises(VoteFailed, match="process 0 is gone"):
        groups[1].all_reduce_min([1])


def test_a_process_that_stands_still_is_named_after_the_deadline():
    groups = connect(2, deadline=0.2)
    with pytest.raises(VoteFailed, match=r"nothing from process 1 for 0.2 s"):
        groups[0].all_reduce_min([1])


def test_processes_that_take_different_steps_are_found():
    groups = connect(2, deadline=1.0)
    groups[1]._number = 5
    results = run(groups, lambda i, g: g.all_reduce_min([1]))
    assert isinstance(
        results[0], VoteFailed
    ) and "process 1 is at vote 6, this process (0) at 1" in str(results[0])


def test_strangers_are_not_let_in():
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    for data in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 50, b"w" * 16 + b"\1" + b"\0" * 7):
        s = socket.create_connection(address)
        s.sendall(data)
    with pytest.raises(
        VoteFailed, match=r"processes \[1\] of 2 did not connect for votes within 0.3 s"
    ):
        listen_for_votes(2, TOKEN, server, 1.0, 0.3)


def test_a_process_without_a_rank_is_refused():
    with pytest.raises(ValueError, match="process 1 owns none of the 2 DP ranks"):
        SocketDPGroup(1, 2, 1.0, {}).bind(2, [])
    with pytest.raises(ValueError, match="2 votes for 1 local ranks"):
        SocketDPGroup(1, 2, 1.0, {}).all_reduce_min([1, 2])
